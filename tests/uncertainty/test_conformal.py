# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import ConformalIntervals, ConformalSets

SCORES = ("aps", "lac")


def classes(number, seed=0, num_classes=5):
    """Probabilities of a model that is wrong about its own certainty, and labels drawn from others."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(number, num_classes, generator=draw, dtype=torch.float64)
    labels = torch.multinomial((0.5 * logits).softmax(-1), 1, generator=draw).squeeze(-1)
    return logits.softmax(-1), labels


def normal(mean, scale):
    """A prediction of normal targets, each draw with the same mean and scale."""
    return Prediction(
        mean.expand(64, *mean.shape), likelihoods.Gaussian(scale=scale), {"scale": torch.full((64, 1), scale)}
    )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_sets_hold_the_class_as_often_as_the_rank_says(score, level):
    """The coverage over calibration sets and points is k / (n + 1) exactly."""
    number, repeats, tested = 37, 1000, 20
    probs, labels = classes(repeats * (number + tested))
    held = []
    for part, truth in zip(probs.split(number + tested), labels.split(number + tested), strict=True):
        sets = ConformalSets.fit(part[:number], truth[:number], level, score)(part[number:])
        held.append(sets.gather(-1, truth[number:, None]).double().mean())
    held = torch.stack(held)
    expected = math.ceil((number + 1) * level) / (number + 1)
    assert abs(held.mean() - expected) < 4 * held.std() / repeats**0.5


@pytest.mark.parametrize("score", ["quantile", "normalized"])
def test_intervals_hold_the_target_as_often_as_the_rank_says(score):
    number, repeats, tested, level = 19, 400, 10, 0.8
    torch.manual_seed(1)
    mean = torch.randn(repeats, number + tested, 1)
    y = mean + 3.0 * torch.randn_like(mean)  # the model's noise is 1
    held = []
    for part, truth in zip(mean, y, strict=True):
        intervals = ConformalIntervals.fit(normal(part[:number], 1.0), truth[:number], level, score)
        lower, upper = intervals(normal(part[number:], 1.0))
        held.append(((lower <= truth[number:]) & (truth[number:] <= upper)).double().mean())
    held = torch.stack(held)
    assert abs(held.mean() - 16 / 20) < 4 * held.std() / repeats**0.5


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_by_class_hold_a_rare_class_as_often_as_asked_for(score):
    torch.manual_seed(0)
    labels = (torch.rand(40_000) < 0.05).long()
    logit = torch.randn(40_000) - 3.5 + 1.5 * labels
    probs = torch.stack([-logit, logit], -1).div(2).softmax(-1)
    calibration, new = slice(20_000), slice(20_000, None)

    def covered(**options):
        sets = ConformalSets.fit(probs[calibration], labels[calibration], 0.9, score, **options)
        held = sets(probs[new]).gather(-1, labels[new][:, None]).squeeze(-1).double()
        return [(float(held[labels[new] == k].mean()), int((labels[new] == k).sum())) for k in range(2)]

    assert covered()[1][0] < 0.5
    # The quantile of the calibration points errs too. Sets by "aps" hold more, because many scores are one.
    assert all(share > 0.9 - 4 * (2 * 0.09 / count) ** 0.5 for share, count in covered(by_class=True))


def test_sets_are_empty_where_the_docstring_says():
    largest = torch.linspace(0.34, 0.99, 14, dtype=torch.float64)
    probs = torch.stack([largest, *[(1 - largest) / 4] * 4], -1)
    empty = {score: ~ConformalSets(0.9, 0.6, score)(probs).any(-1) for score in SCORES}
    assert torch.equal(empty["aps"], largest > 0.6)
    assert torch.equal(empty["lac"], largest < 1 - 0.6)
    assert all(some.any() and not some.all() for some in empty.values())
    # So it is for a threshold that was found: a certain model that is often wrong.
    probs, labels = classes(400)
    assert (ConformalSets.fit(probs, labels, 0.5, "aps")(probs).sum(-1) == 0).any()


def test_a_class_with_too_few_calibration_points_is_named():
    probs = torch.full((30, 3), 1 / 3)
    labels = torch.tensor([0] * 15 + [1] * 10 + [2] * 5)
    with pytest.raises(ValueError, match=r"labels of class 2 must be of at least 9 calibration points .* got 5"):
        ConformalSets.fit(probs, labels, by_class=True)
    with pytest.raises(ValueError, match="threshold must be a finite number, got nan"):
        ConformalSets(0.9, (0.5, float("nan"), 0.5))


class Given(BaseEstimator):
    """An estimator whose inputs are its predictions."""

    classes_ = np.arange(5)

    def fit(self, X, y):
        return self

    def predict(self, X):
        return X.argmax(-1) if X.shape[1] > 1 else X[:, 0]

    def predict_proba(self, X):
        return X

    def __sklearn_is_fitted__(self):
        return True


class GivenClasses(ClassifierMixin, Given):
    """The same of classes."""


class GivenNumbers(RegressorMixin, Given):
    """The same of numbers."""


def test_sets_of_least_ambiguity_equal_those_of_mapie():
    mapie = pytest.importorskip("mapie.classification", reason="MAPIE is not installed")
    probs, labels = classes(600)
    theirs = mapie.SplitConformalClassifier(GivenClasses(), confidence_level=0.9, conformity_score="lac", prefit=True)
    theirs.conformalize(probs[:300].numpy(), labels[:300].numpy())
    _, found = theirs.predict_set(probs[300:].numpy())
    ours = ConformalSets.fit(probs[:300], labels[:300], 0.9, "lac")(probs[300:])
    assert torch.equal(ours, torch.as_tensor(found[:, :, 0]))


def test_intervals_equal_those_of_mapie():
    mapie = pytest.importorskip("mapie.regression", reason="MAPIE is not installed")
    torch.manual_seed(0)
    mean = torch.randn(600, 1, dtype=torch.float64)
    y = mean + torch.randn_like(mean)
    theirs = mapie.SplitConformalRegressor(GivenNumbers(), confidence_level=0.9, prefit=True)
    theirs.conformalize(mean[:300].numpy(), y[:300, 0].numpy())
    _, found = theirs.predict_interval(mean[300:].numpy())
    intervals = ConformalIntervals.fit(normal(mean[:300], 1.0), y[:300], score="normalized")
    ours = torch.stack(intervals(normal(mean[300:], 1.0)), 1).squeeze(-1)
    # A mean over 64 equal draws in double precision.
    torch.testing.assert_close(ours, torch.as_tensor(found[:, :, 0]), rtol=1e-6, atol=1e-6)


def test_each_element_of_a_target_has_its_own_threshold():
    torch.manual_seed(0)
    y = torch.randn(200, 2) * torch.tensor([1.0, 10.0])
    prediction = normal(torch.zeros(200, 2), 1.0)
    thresholds = ConformalIntervals.fit(prediction, y, score="normalized").threshold
    assert thresholds.shape == (2,)
    assert 5 < thresholds[1] / thresholds[0] < 20


def test_an_interval_that_would_end_before_it_begins_is_its_center():
    """Quantiles that are far too wide, and targets that are all zero: the correction is below minus half the width."""
    torch.manual_seed(0)
    intervals = ConformalIntervals.fit(normal(torch.zeros(50, 1), 10.0), torch.zeros(50, 1))
    assert intervals.threshold < 0
    lower, upper = intervals(normal(torch.zeros(3, 1), 1.0))
    assert torch.equal(lower, upper)


def test_too_few_calibration_points_for_the_level_are_refused():
    probs, labels = classes(18)
    ConformalSets.fit(*classes(19), level=0.95)
    with pytest.raises(ValueError, match=r"labels must be of at least 19 calibration points for level=0\.95, got 18"):
        ConformalSets.fit(probs, labels, level=0.95)
    with pytest.raises(ValueError, match="targets must be of at least 9 calibration points"):
        ConformalIntervals.fit(normal(torch.zeros(8, 1), 1.0), torch.zeros(8, 1))


def test_other_targets_than_those_of_the_calibration_are_refused():
    torch.manual_seed(0)
    intervals = ConformalIntervals.fit(normal(torch.zeros(20, 2), 1.0), torch.randn(20, 2))
    with pytest.raises(ValueError, match=r"prediction must have targets of shape \[2\], got \[1\]"):
        intervals(normal(torch.zeros(3, 1), 1.0))
