# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.common import Results
from benchmarks.uncertainty import robustness
from benchmarks.uncertainty._methods import Setting
from benchmarks.uncertainty.robustness import BATCH_SIZES, DECAYS, RATES, SIZES, configuration, scored, shares

X, Y = torch.ones(8, 2), torch.arange(8) % 2
SETTING = Setting(epochs=1, batch_size=8, num_samples=2, init_scale=0.01, compile=False)


def test_random_settings_are_out_of_the_paper_s_choices_and_each_has_its_own():
    found = [configuration(SIZES["default"], number) for number in range(40)]
    assert {one.optimizer for one in found} == set(RATES)
    assert all(one.rate in RATES[one.optimizer] and one.decay in DECAYS[one.optimizer] for one in found)
    assert {one.batch_size for one in found} == set(BATCH_SIZES)
    assert len({round(math.log(math.expm1(one.init_scale))) for one in found}) == 4
    assert len(set(found)) > 30
    assert found[3] == configuration(SIZES["default"], 3)


def test_a_training_that_diverges_has_learned_nothing():
    setting = replace(SETTING, epochs=4, optimizer="sgd", rate=1e38)
    row = scored("radial", lambda dropout: nn.Linear(2, 2), (X, Y), (X, Y), setting, 0)
    assert (row["auc"], row["nll"], row["diverged"]) == (0.5, math.log(2), True)


def test_a_mistake_is_no_divergence():
    with pytest.raises(ValueError, match=r"the network of bnn.* failed"):
        scored("radial", lambda dropout: nn.Linear(3, 2), (X, Y), (X, Y), SETTING, 0)


def test_a_constant_prediction_is_chance():
    row = scored("radial", lambda dropout: nn.Linear(2, 2), (X, Y), (X, Y), SETTING, 0)
    assert (row["auc"], row["diverged"]) == (0.5, False)


def test_shares_are_of_settings_that_reach_a_threshold(tmp_path):
    results = Results(tmp_path / "results.json", {})
    for number, auc in enumerate((0.5, 0.74, 0.75, 0.8)):
        results.add({"part": "random", "method": "radial", "number": number}, lambda auc=auc: {"auc": auc})
    assert shares(results, "radial", 0.75) == (0.5, 0.25)
    assert shares(results, "radial", 0.0) == (1.0, 0.0)


def test_a_fold_is_no_part_of_what_it_is_judged_by(tiny_data, monkeypatch):
    seen = []

    def record(name, make_net, fitted, unseen, setting, seed):
        seen.append((fitted[0].flatten(1), unseen[0].flatten(1)))
        return {"auc": 0.5, "diverged": False, "seconds": 0.0}

    monkeypatch.setattr(robustness, "scored", record)
    robustness.cross_validated(tiny_data, SIZES["default"], "radial", 0)
    assert len(seen) == 3
    for fitted, unseen in seen:
        assert len(fitted) + len(unseen) == 100
        assert torch.cdist(fitted, unseen).min() > 1e-3
    assert torch.cat([unseen for _, unseen in seen]).unique(dim=0).shape[0] == 100


def test_grids_have_every_pair():
    grids = robustness.grids(SIZES["default"])
    assert {part: len(cells) for part, cells in grids.items()} == {"scales": 12, "prior": 4, "network": 9}
