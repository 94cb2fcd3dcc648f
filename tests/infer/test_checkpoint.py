# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints: whole or not there, and refused where they do not belong."""

from functools import partial
from pathlib import Path

import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.optim import SGD, Adam

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit
from pyro_radial.infer import checkpoint as checkpoint_module
from pyro_radial.infer.checkpoint import check_entries, copied, load_checkpoint, save_checkpoint
from pyro_radial.nn import likelihoods

ROWS = 12
CPU = torch.device("cpu")


def data(rows=ROWS):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(3))
    return x, x.sum(-1, keepdim=True)


def problem(width=4, guide=AutoRadial, likelihood=likelihoods.Gaussian, activation=nn.Tanh):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, width), activation(), nn.Linear(width, 1))
    model = SupervisedModel(BayesianModule(net), likelihood())
    return model, guide(model)


def train(path, pair=None, epochs=1, rows=ROWS, **kwargs):
    settings = {"batch_size": 6, "seed": 0, "progress": False, **kwargs}
    return fit(*(pair or problem()), data(rows), epochs=epochs, checkpoint=path, **settings)


def test_a_checkpoint_of_fit_is_read_with_weights_only_and_holds_what_it_says(tmp_path):
    path = tmp_path / "deep" / "folder" / "run.pt"
    model, guide = problem()
    result = train(path, (model, guide), validation=data(4))
    state = torch.load(path, weights_only=True)
    assert state["epoch"] == 1
    assert state["history"] == result.history
    assert all(torch.equal(value, guide.state_dict()[name]) for name, value in state["guide"].items())
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("broken", ["os.replace", "os.fsync", "torch.save"])
def test_a_write_that_fails_leaves_the_old_checkpoint(broken, tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})

    def fail(*args):
        if broken == "torch.save":
            args[1].write(b"half")
        raise OSError("disk full")

    owner, name = broken.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(checkpoint_module, owner), name, fail)
        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(path, {"epoch": 2})
    assert load_checkpoint(path, CPU)["epoch"] == 1
    save_checkpoint(path, {"epoch": 3})
    assert load_checkpoint(path, CPU)["epoch"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def truncated(path):
    path.write_bytes(path.read_bytes()[:-200])


def shortened_to(size):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def text(path):
    path.write_text("loss: 0.5\n")


def foreign(path):
    torch.save({"state_dict": {}}, path)


def bare_tensor(path):
    torch.save(torch.zeros(3), path)


def code(path):
    torch.save({"format": 1, "model": nn.Linear(1, 1)}, path)


@pytest.mark.parametrize(
    "spoil",
    [truncated, shortened_to(0), shortened_to(3), shortened_to(500), text, foreign, bare_tensor, code],
    ids=["truncated", "empty", "3 bytes", "500 bytes", "text", "foreign", "bare tensor", "pickled module"],
)
def test_a_file_that_is_no_checkpoint_is_named(spoil, tmp_path):
    path = tmp_path / "run.pt"
    train(path)
    spoil(path)
    with pytest.raises(ValueError, match=r"checkpoint .*run\.pt is (damaged|not one)"):
        train(path, epochs=2)


def only_weights(model):
    return AutoRadial(poutine.block(model, hide=["0.bias"]))


def gaussian_with_a_trained_scale(**kwargs):
    return likelihoods.Gaussian(learn_scale=True, **kwargs)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (partial(problem, width=5), r"another guide: 6 entries differ \(locs.0.bias_unconstrained: here \(5,\), there"),
        (partial(problem, guide=AutoDelta), "another guide"),
        (partial(problem, guide=only_weights), r"another guide: 2 entries differ \(locs.0.bias.*here None"),
        (partial(problem, guide=AutoMeanField), "made with guide='AutoRadial', this run has guide='AutoMeanField'"),
        (partial(problem, likelihood=gaussian_with_a_trained_scale), "another model: 1 entries differ"),
        (partial(problem, likelihood=likelihoods.Poisson), "made with likelihood='Gaussian', .* likelihood='Poisson'"),
    ],
)
def test_a_checkpoint_of_another_model_or_guide_is_refused_and_changes_nothing(pair, message, tmp_path):
    path = tmp_path / "run.pt"
    train(path)
    model, guide = pair()
    x, y = data()
    made = guide(x, y.abs().round())
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt .*{message}"):
        fit(model, guide, (x, y.abs().round()), epochs=2, checkpoint=path, batch_size=6, seed=0, progress=False)
    assert made
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 4}, "batch_size=6, this run has batch_size=4"),
        ({"seed": 1}, "seed=0, this run has seed=1"),
        ({"accumulate": 2}, "accumulate=1, this run has accumulate=2"),
        ({"pretrain_epochs": 1}, "pretrain_epochs=0, this run has pretrain_epochs=1"),
        ({"rows": 11}, "num_data=12, this run has num_data=11"),
        ({"validation": data(4)}, "validation=False, this run has validation=True"),
        ({"optim": partial(SGD, lr=0.1)}, r"optimizer=.Adam\(.*this run has optimizer=.SGD"),
        ({"optim": partial(Adam, betas=(0.8, 0.9))}, r"'betas': \(0.9, 0.999\).*this run has .*'betas': \(0.8, 0.9\)"),
        ({"loss": RadialELBO(kl_weight=0.5)}, "kl_weight=1.0, this run has kl_weight=0.5"),
        ({"loss": RadialELBO(num_particles=2)}, "num_particles=1, this run has num_particles=2"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_by_their_name(settings, message, tmp_path):
    path = tmp_path / "run.pt"
    train(path)
    pair = problem()
    pair[1].setup(*data())
    before = {name: value.clone() for name, value in pair[1].state_dict().items()}
    with pytest.raises(ValueError, match=rf"checkpoint .*run\.pt was made with .*{message}"):
        train(path, pair, epochs=2, **settings)
    assert all(torch.equal(value, before[name]) for name, value in pair[1].state_dict().items())


def test_what_could_not_be_read_back_is_refused_before_it_replaces_a_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"epoch": 1})
    with pytest.raises(ValueError, match=r"checkpoint .*run\.pt must hold tensors and plain values alone.*got"):
        save_checkpoint(path, {"epoch": 2, "model": {"_extra_state": nn.ReLU()}})
    assert load_checkpoint(path, CPU)["epoch"] == 1


def test_a_copy_of_a_state_is_independent_in_tensors_and_in_the_rest():
    state = {"weight": nn.Parameter(torch.ones(2)), "_extra_state": {"names": ["a"]}}
    kept = copied(state)
    state["weight"].data.zero_()
    state["_extra_state"]["names"].append("b")
    assert kept["weight"].tolist() == [1.0, 1.0]
    assert not kept["weight"].requires_grad
    assert kept["_extra_state"] == {"names": ["a"]}


def test_entries_are_compared_by_name_and_shape_and_not_by_value():
    path = Path("run.pt")
    here = {"weight": torch.zeros(2, 3), "_extra_state": {"calls": 1}}
    check_entries(path, "model", here, {"weight": torch.ones(2, 3), "_extra_state": {"calls": 7}})
    with pytest.raises(ValueError, match=r"run\.pt is from another model: 1 entries differ \(weight: here \(2, 3\)"):
        check_entries(path, "model", here, {**here, "weight": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"_extra_state: here no tensor, there \(4,\)"):
        check_entries(path, "model", here, {**here, "_extra_state": torch.zeros(4)})
