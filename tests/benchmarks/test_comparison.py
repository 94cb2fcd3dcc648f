# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss

from benchmarks.common import Results
from benchmarks.uncertainty._comparison import (
    CANDIDATES,
    FIRST_SEED,
    SCORES,
    SETTING_OF,
    Standardized,
    Study,
    compared,
    options_of,
    scores,
    split,
    style_of,
)
from benchmarks.uncertainty._methods import DEEP_ENSEMBLE, METHODS, PLAIN, Setting
from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods

SETTING = Setting(epochs=2, batch_size=20, rate=0.03, num_members=2, num_samples=4, compile=False)
TEST = torch.randn(30, 2, generator=torch.Generator().manual_seed(2)), torch.arange(30) % 2


def data(name):
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(60, 2, generator=generator)
    return split((x, torch.cat([(x[:-2].sum(-1) > 0).long(), torch.tensor([0, 1])])), 20)


def judged(learned, name):
    return {"probabilities": learned.predict(TEST[0]).mean.tolist()}


def study(**options):
    given = {"names": ("a", "bb"), "setting": SETTING, "methods": (PLAIN, DEEP_ENSEMBLE), **options}
    return Study(lambda dropout: nn.Linear(2, 2), data, judged, **given)


def test_the_last_rows_are_for_validation():
    x = torch.arange(10)
    (fitted, _), (held_out, _) = split((x, x), 3)
    assert (fitted.tolist(), held_out.tolist()) == ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9])
    (fitted, _), (held_out, _) = split((x, x), 3, 2)
    assert (fitted.tolist(), held_out.tolist()) == ([0, 1], [7, 8, 9])


def test_every_method_has_a_setting_and_a_line_of_its_own():
    assert {SETTING_OF.get(method, method) for method in METHODS} == CANDIDATES.keys()
    assert len({len(candidates) for candidates in CANDIDATES.values()}) == 1
    styles = [(style_of(method)["color"], style_of(method)["linestyle"]) for method in METHODS]
    assert len(set(styles)) == len(METHODS)


def test_images_are_in_units_of_the_training_images(tiny_data):
    images = Standardized("mnist", tiny_data)
    x, _ = images.train
    assert (float(x.mean()), float(x.std())) == (pytest.approx(0.0, abs=1e-5), pytest.approx(1.0, abs=1e-5))
    raw = images.data.train_images
    torch.testing.assert_close(images.test(5)[0] * raw.std() + raw.mean(), images.data.test_images[:5])


def test_settings_are_the_best_on_validation_rows_and_tests_have_other_seeds(tmp_path):
    results = Results(tmp_path / "rows.json", {})
    study().compute(results, 2, 1, 1)
    chosen = results.where(use="choice")
    assert len(chosen) == len(CANDIDATES[PLAIN])
    assert {row["seed"] for row in chosen} == {0}
    assert options_of(results, DEEP_ENSEMBLE) == min(chosen, key=lambda row: row["nll"])["options"]
    tests = {(row["data"], row["method"], row["seed"]) for row in results.where(use="test")}
    assert tests == set(product(("a", "bb"), (PLAIN, DEEP_ENSEMBLE), (FIRST_SEED, FIRST_SEED + 1)))


def test_an_ensemble_that_shares_is_the_mixture_of_single_networks(tmp_path):
    results = Results(tmp_path / "rows.json", {})
    study(shares=True).compute(results, 5, 1, 1)
    for name in ("a", "bb"):
        single = torch.tensor(results.values("probabilities", use="test", data=name, method=PLAIN))
        mixed = results.where(use="test", data=name, method=DEEP_ENSEMBLE)
        # Five networks make two pairs.
        assert [row["seed"] for row in mixed] == [FIRST_SEED, FIRST_SEED + 2]
        for number, row in enumerate(mixed):
            expected = single[2 * number : 2 * number + 2].mean(0)
            torch.testing.assert_close(torch.tensor(row["probabilities"]), expected, atol=1e-5, rtol=0)
        assert len({tuple(map(tuple, own)) for own in single.tolist()}) == 5
        seconds = results.values("seconds", use="test", data=name, method=PLAIN)
        assert mixed[1]["seconds"] == pytest.approx(seconds[2] + seconds[3], abs=1e-5)


def test_a_method_can_have_fewer_seeds(tmp_path):
    results = Results(tmp_path / "rows.json", {})
    study(names=("a",), seeds_of={DEEP_ENSEMBLE: 1}).compute(results, 2, 1, 1)
    assert [row["method"] for row in results.where(use="test")] == [PLAIN, DEEP_ENSEMBLE, PLAIN]


def test_scores_are_of_the_mean_probabilities():
    samples = torch.randn(3, 30, 2, generator=torch.Generator().manual_seed(0))
    prediction = Prediction(samples, likelihoods.Categorical())
    found = scores(prediction, TEST[1])
    assert found["nll"] == pytest.approx(float(nll_loss(prediction.mean.log(), TEST[1])), rel=1e-5)
    assert found.keys() == SCORES.keys()


def test_a_comparison_holds_beyond_two_standard_errors():
    assert compared("", [1.0, 1.2, 1.1], [2.0, 2.1, 2.0]).held
    assert not compared("", [2.0, 2.1, 2.0], [1.0, 1.2, 1.1]).held
    assert compared("", [2.0, 2.1, 2.0], [1.0, 1.2, 1.1], higher_is_better=True).held
    # A difference of 0.1 with a standard error of 0.1.
    assert not compared("", [0.9, 1.1, 0.7], [1.0, 1.0, 1.0]).held
    assert compared("lower", [0.9], [1.0])[::4] == ("lower (one of each)", False)
