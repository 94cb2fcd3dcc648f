# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0


import pytest
import torch
from torch import nn

from benchmarks.uncertainty._methods import Setting, train

SETTING = Setting(epochs=16, batch_size=20, rate=0.03, ivon_rate=0.5, num_members=2, num_samples=8, compile=False)


def make_net(dropout):
    drop = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), *drop, nn.Linear(16, 2))


def data(number, seed):
    """A line tells the classes apart, but for a tenth of the labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 2, generator=generator)
    wrong = torch.rand(number, generator=generator) < 0.1
    return x, ((x.sum(-1) > 0) ^ wrong).long()


TRAIN, VALIDATION, TEST = data(100, 0), data(60, 1), data(200, 2)


def run(name, folder=None, setting=SETTING, **options):
    return train(name, make_net, TRAIN, VALIDATION, setting, 10, folder, **options)


@pytest.mark.parametrize("name", ["deep ensemble", "radial ensemble"])
def test_an_ensemble_has_the_single_network_as_its_first_member(name, tmp_path):
    single = run({"deep ensemble": "plain"}.get(name, "radial"), tmp_path)
    times = {path: path.read_text() for path in tmp_path.glob("*/seconds_1")}
    ensemble = run(name, tmp_path)
    assert {path: path.read_text() for path in tmp_path.glob("*/seconds_1")} == times != {}
    assert len(list(tmp_path.glob("*/member_*.pt"))) == 2
    assert ensemble.seconds > single.seconds
    if name == "deep ensemble":
        assert torch.equal(ensemble.predict(TEST[0]).samples[:1], single.predict(TEST[0]).samples)
    again = run(name, tmp_path)
    assert again.seconds == ensemble.seconds
    assert torch.equal(again.predict(TEST[0]).samples, ensemble.predict(TEST[0]).samples)


def test_what_is_made_of_the_plain_network_shares_its_training(tmp_path):
    for name in ("plain", "temperature", "last-layer Laplace"):
        run(name, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    assert len(list(tmp_path.glob("plain/member_*.pt"))) == 1
