# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import interval_coverage, quantile_calibration

NORMAL = torch.distributions.Normal(0.0, 1.0)
LEVELS = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


def test_coverage_worked_by_hand():
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = torch.tensor([1.0, 0.0, 3.5, -0.1])  # On either end, above, below.
    assert interval_coverage(lower, upper, y).item() == 0.5
    wide = interval_coverage(torch.stack([lower, lower - 1]), torch.stack([upper, upper + 1]), y)
    assert wide.tolist() == [0.5, 1.0]
    assert interval_coverage(lower[:, None], upper[:, None], y).item() == 0.5
    both = interval_coverage(
        torch.stack([lower, lower - 1])[..., None], torch.stack([upper, upper + 1])[..., None], y[:, None]
    )
    assert both.tolist() == [0.5, 1.0]


def test_calibration_worked_by_hand():
    quantiles = torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 3.0]])
    curve = quantile_calibration(quantiles, [0.1, 0.5, 0.8], torch.tensor([1.0, 3.5]))
    assert curve.share.tolist() == [0.0, 0.5, 0.5]
    assert curve.count == 2
    assert curve.error.item() == pytest.approx((0.1 + 0.0 + 0.3) / 3)


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_shares_are_those_of_the_scale_that_the_model_believes(factor):
    """Targets of a standard normal distribution, quantiles of one that is too narrow, right or too wide."""
    number = 20_000
    y = torch.randn(number)
    quantiles = factor * NORMAL.icdf(LEVELS)[:, None].expand(-1, number)
    curve = quantile_calibration(quantiles, LEVELS, y)
    expected = NORMAL.cdf(factor * NORMAL.icdf(LEVELS))
    assert ((curve.share - expected).abs() < 4 * 0.5 / math.sqrt(number)).all()
    covered = interval_coverage(-quantiles[3:], quantiles[3:], y)
    assert ((covered - (2 * expected[3:] - 1)).abs() < 4 * 0.5 / math.sqrt(number)).all()


def test_a_prediction_of_the_right_model_is_calibrated():
    """Functions and targets of one distribution: the quantiles of all cover what they promise."""
    functions, points = 200, 5000
    offsets = torch.randn(functions + 1, points, 1)
    y = offsets[-1] + 0.5 * torch.randn(points, 1)
    prediction = Prediction(offsets[:-1], likelihoods.Gaussian(), {"scale": torch.full((functions, 1), 0.5)})
    quantiles = prediction.quantiles(LEVELS, num_targets=2)
    curve = quantile_calibration(quantiles, LEVELS, y)
    # Binomial errors of the shares, and one draw of the 400 that the rank of a level may be off by.
    tolerance = 4 * (LEVELS * (1 - LEVELS) / points).sqrt() + 1 / 400
    assert ((curve.share - LEVELS).abs() < tolerance).all()
    covered = interval_coverage(quantiles[:2], quantiles[3:].flip(0), y)
    assert covered.tolist() == pytest.approx([0.9, 0.5], abs=4 * 0.5 / math.sqrt(points) + 1 / 200)


GOOD = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval_coverage(GOOD, GOOD[0], torch.zeros(3)), "interval_coverage: upper must have the shape of"),
        (lambda: interval_coverage(GOOD + 1, GOOD, torch.zeros(3)), "interval_coverage: lower must be at most upper"),
        (
            lambda: interval_coverage(GOOD, GOOD, torch.zeros(2)),
            r"targets must have shape \[3\] to fit lower",
        ),
        (lambda: interval_coverage(GOOD[0], GOOD[0], GOOD), "targets must have shape"),
        (lambda: interval_coverage(GOOD, GOOD / 0, torch.zeros(3)), "interval_coverage: lower must be at most upper"),
        (lambda: interval_coverage(GOOD, GOOD, torch.full((3,), math.nan)), "targets must be finite"),
        (lambda: quantile_calibration(GOOD, [0.1], torch.zeros(3)), r"quantiles must have shape \[1, N, ...\]"),
        (lambda: quantile_calibration(GOOD, [0.0, 0.5], torch.zeros(3)), "levels must be increasing numbers strictly"),
        (lambda: quantile_calibration(GOOD, [10, 50], torch.zeros(3)), "levels must be increasing numbers strictly"),
        (lambda: quantile_calibration(GOOD, [0.5, 0.1], torch.zeros(3)), "levels must be increasing"),
        (lambda: quantile_calibration(GOOD, [0.1, 0.5], torch.zeros(2)), r"targets must have shape \[3\]"),
        (lambda: quantile_calibration(GOOD / 0, [0.1, 0.5], torch.zeros(3)), "quantiles must be finite"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
