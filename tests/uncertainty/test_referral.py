# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from torch.nn.functional import nll_loss

from pyro_radial.uncertainty import auroc, referral_curve
from pyro_radial.uncertainty.metrics import accuracy
from tests.helpers.predictions import simulate

PROBS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.45, 0.55], [0.7, 0.3]])
LABELS = torch.tensor([0, 1, 0, 1, 0])
UNCERTAINTY = torch.tensor([0.1, 0.2, 0.4, 0.5, 0.3])


def log_loss(probs, labels):
    return nll_loss(probs.log(), labels)


def area(probs, labels):
    return auroc(probs[labels != 1, 1], probs[labels == 1, 1])


def mean(predictions, targets):
    return (predictions - targets).mean()


@pytest.mark.parametrize("score", [accuracy, log_loss, area])
def test_the_score_is_that_of_the_most_certain_points(score):
    probs, labels = simulate(200, 3)
    uncertainty = torch.special.entr(probs).sum(-1)
    curve = referral_curve(score, probs, labels, uncertainty, num_resamples=2)
    for share, value in zip(curve.referred.tolist(), curve.score.tolist(), strict=True):
        kept = uncertainty.argsort()[: 200 - round(200 * share)]
        assert value == pytest.approx(float(score(probs[kept], labels[kept])))
    number = len(curve.referred)
    assert (curve.resamples.shape, curve.stderr.shape) == ((2, number), (number,))


def test_bootstrap_errors_are_those_of_the_mean():
    """Nothing referred, the score is a mean, whose standard error is known; so nearly is that of a random half."""
    number, resamples = 400, 1000
    values = torch.randn(number, dtype=torch.float64)
    zeros = torch.zeros(number)
    curve = referral_curve(mean, values, zeros, torch.rand(number), shares=[0.0, 0.5], num_resamples=resamples)
    expected = values.std(unbiased=False) / math.sqrt(number)
    # A standard deviation of R normal numbers is known to 1 / sqrt(2 R).
    assert curve.stderr[0].item() == pytest.approx(expected.item(), rel=4 / math.sqrt(2 * resamples))
    # Of half the points; which these are is chance too, so that only about 10 % can be asked.
    half = values.std().item() / math.sqrt(number / 2)
    assert curve.stderr[1].item() == pytest.approx(half, rel=0.15)
    assert curve.resamples[:, 0].mean().item() == pytest.approx(
        values.mean().item(), abs=4 * expected.item() / math.sqrt(resamples)
    )


def test_two_methods_are_compared_on_the_same_resamples():
    probs, labels = simulate(300, 3)
    first = referral_curve(accuracy, probs, labels, 1 - probs.amax(-1))
    second = referral_curve(accuracy, probs, labels, torch.rand(300))
    # Nothing referred, they are the same method: their difference has no error, whatever that of each.
    assert torch.equal(first.resamples[:, 0], second.resamples[:, 0])
    assert not torch.equal(first.resamples[:, 1:], second.resamples[:, 1:])


def test_a_class_missing_from_what_is_left_is_named_with_its_share():
    """All of class 1 is uncertain, so that at 40 % none of it is left."""
    labels = torch.tensor([0, 0, 1, 1, 0])
    with pytest.raises(ValueError, match=r"for the 3 of 5 points left at a referred share of 0.4: scores_positive"):
        referral_curve(area, PROBS, labels, UNCERTAINTY, shares=[0.0, 0.4])
    with pytest.raises(ValueError, match=r"score must be finite for the 3 of 5 points left .* share of 0.4, got nan"):
        referral_curve(lambda p, y: y.float().std() / y.sum(), PROBS, labels, UNCERTAINTY, shares=[0.4])


def test_too_many_resamples_without_a_score_are_an_error():
    labels = torch.tensor([0, 1] + [0] * 38)
    probs = torch.full((40, 2), 0.5)
    # The only point of its class is the most uncertain but six: it is nearly always referred twice over.
    uncertainty = torch.zeros(40)
    uncertainty[[1, 2, 3, 4, 5, 6, 7]] = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="score must be defined for most resamples, got 101 of"):
        referral_curve(area, probs, labels, uncertainty, shares=[0.0, 0.15])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shares": [0.1, 0.1]}, "shares must be increasing"),
        ({"shares": [0.0, 0.95]}, "shares must leave at least one of 5 points, got 0.95"),
        ({"num_resamples": 1}, "num_resamples must be an integer of at least 2, got 1"),
        ({"predictions": PROBS * 2}, "probs must sum to one"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"predictions": PROBS, "targets": LABELS, "uncertainty": UNCERTAINTY, **change}
    with pytest.raises(ValueError, match=message):
        referral_curve(accuracy, **arguments)
