# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.common import Results
from benchmarks.uncertainty._comparison import FIRST_SEED, Study, compared, options_of, split
from benchmarks.uncertainty._methods import DEEP_ENSEMBLE, PLAIN, Setting

SETTING = Setting(epochs=2, batch_size=20, rate=0.03, num_members=2, num_samples=4, compile=False)
CANDIDATES = {PLAIN: ({"prior_stddev": 1.0}, {"prior_stddev": 0.1})}
TEST = torch.randn(30, 2, generator=torch.Generator().manual_seed(2)), torch.arange(30) % 2


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 2, generator=generator)
    return split((x, torch.cat([(x[:-2].sum(-1) > 0).long(), torch.tensor([0, 1])])), 20)


def judged(learned):
    return {"probabilities": learned.predict(TEST[0]).mean.tolist()}


def study(seed):
    methods = (PLAIN, DEEP_ENSEMBLE)
    return Study(lambda dropout: nn.Linear(2, 2), partial(data, seed), judged, SETTING, methods, CANDIDATES, 2)


def test_the_last_rows_are_for_validation():
    x = torch.arange(10)
    (fitted, _), (held_out, _) = split((x, x), 3)
    assert (fitted.tolist(), held_out.tolist()) == ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9])
    (fitted, _), (held_out, _) = split((x, x), 3, 2)
    assert (fitted.tolist(), held_out.tolist()) == ([0, 1], [7, 8, 9])


def test_settings_are_the_best_on_validation_rows_and_tests_have_other_seeds(tmp_path):
    results = Results(tmp_path / "rows.json", {})
    study(1).compute(results, 4, 1, 1)
    chosen = results.where(use="choice")
    assert len(chosen) == len(CANDIDATES[PLAIN])
    assert {row["seed"] for row in chosen} == {0}
    assert options_of(results, DEEP_ENSEMBLE) == min(chosen, key=lambda row: row["nll"])["options"]
    tests = {(row["method"], row["seed"]) for row in results.where(use="test")}
    single = {(PLAIN, FIRST_SEED + number) for number in range(4)}
    assert tests == single | {(DEEP_ENSEMBLE, FIRST_SEED), (DEEP_ENSEMBLE, FIRST_SEED + 2)}


@pytest.mark.parametrize("seed", [1, 2])
def test_an_ensemble_is_the_mixture_of_single_networks(tmp_path, seed):
    results = Results(tmp_path / "rows.json", {})
    study(seed).compute(results, 5, 1, 1)
    single = torch.tensor(results.values("probabilities", use="test", method=PLAIN))
    mixed = results.where(use="test", method=DEEP_ENSEMBLE)
    # Five networks make two pairs.
    assert [row["seed"] for row in mixed] == [FIRST_SEED, FIRST_SEED + 2]
    for number, row in enumerate(mixed):
        expected = single[2 * number : 2 * number + 2].mean(0)
        torch.testing.assert_close(torch.tensor(row["probabilities"]), expected, atol=1e-5, rtol=0)
    assert len({tuple(map(tuple, own)) for own in single.tolist()}) == 5
    seconds = results.values("seconds", use="test", method=PLAIN)
    assert mixed[1]["seconds"] == pytest.approx(seconds[2] + seconds[3], abs=1e-5)


def test_a_comparison_holds_beyond_two_standard_errors():
    assert compared("", [1.0, 1.2, 1.1], [2.0, 2.1, 2.0]).supported
    assert not compared("", [2.0, 2.1, 2.0], [1.0, 1.2, 1.1]).supported
    # A difference of 0.1 with a standard error of 0.1.
    assert not compared("", [0.9, 1.1, 0.7], [1.0, 1.0, 1.0]).supported
    assert compared("lower", [0.9], [1.0])[::4] == ("lower (one of each)", False)
