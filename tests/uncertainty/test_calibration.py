# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from pyro_radial.uncertainty import (
    accuracy,
    adaptive_calibration_error,
    expected_calibration_error,
    reliability,
)
from tests.helpers.class_probabilities import simulate


def test_certainty_belongs_to_the_last_bin():
    probs = torch.tensor([[0.95, 0.05], [1.0, 0.0]])
    labels = torch.tensor([0, 1])
    assert reliability(probs, labels, num_bins=10).count.tolist() == [0] * 9 + [2]
    assert expected_calibration_error(probs, labels, num_bins=10).item() == pytest.approx(0.475)


def test_a_confidence_rounded_above_one_belongs_to_the_last_bin():
    probs = torch.tensor([[1.0 + 1e-6, 0.0]])
    assert reliability(probs, torch.tensor([0]), num_bins=3).count.tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_confidence_on_an_edge_belongs_to_the_bin_below(dtype):
    for num_bins in (3, 5, 7, 10, 15):
        for upper in range(num_bins // 2 + 1, num_bins + 1):
            edge = torch.tensor(upper, dtype=dtype) / num_bins
            probs = torch.stack([edge, 1 - edge])[None]
            count = reliability(probs, torch.tensor([0]), num_bins).count
            assert count.argmax().item() == upper - 1, (num_bins, upper)


def test_empty_bins_hold_nan_and_weigh_nothing():
    bins = reliability(torch.tensor([[0.9, 0.1]]), torch.tensor([0]), num_bins=4)
    assert bins.accuracy.isnan().tolist() == bins.confidence.isnan().tolist() == [True, True, True, False]
    assert bins.expected_calibration_error.item() == pytest.approx(0.1)


def test_calibrated_sample_is_within_sampling_error():
    num_points, num_bins = 20_000, 15
    probs, labels = simulate(num_points, 10)
    # In expectation the calibration error of a calibrated sample is at most the sum over bins of the share times the
    # standard error, which Cauchy-Schwarz bounds by sqrt(num_bins / (4 N)).
    bound = math.sqrt(num_bins / (4 * num_points))
    assert expected_calibration_error(probs, labels, num_bins).item() < bound
    # The same test notices a slightly overconfident model.
    sharpened = probs.pow(1.2) / probs.pow(1.2).sum(-1, keepdim=True)
    assert expected_calibration_error(sharpened, labels, num_bins).item() > 2 * bound


def rows(num_classes):
    weights = st.lists(st.floats(0.01, 1), min_size=num_classes, max_size=num_classes)
    return st.tuples(weights, st.integers(0, num_classes - 1))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 4).flatmap(lambda k: st.lists(rows(k), min_size=1, max_size=12)), st.integers(1, 20))
def test_calibration_error_is_bounded_and_simple_in_one_bin(data, num_bins):
    weights = torch.tensor([row for row, _ in data], dtype=torch.float64)
    probs = weights / weights.sum(-1, keepdim=True)
    labels = torch.tensor([label for _, label in data])
    gap = (accuracy(probs, labels) - probs.max(-1).values.mean()).abs()
    error = expected_calibration_error(probs, labels, num_bins)
    # Splitting bins can only add to the error (triangle inequality).
    assert gap.item() - 1e-12 <= error.item() <= 1
    assert expected_calibration_error(probs, labels, 1).item() == pytest.approx(gap.item(), abs=1e-12)
    assert reliability(probs, labels, num_bins).count.sum() == len(labels)


def test_bins_of_equal_mass_worked_by_hand():
    probs = torch.tensor([[0.95, 0.05], [1.0, 0.0]])
    labels = torch.tensor([0, 1])
    # In one bin half are right at a mean confidence of 0.975; alone, one is 0.05 too low and one is 1 too high.
    assert adaptive_calibration_error(probs, labels, num_bins=1).item() == pytest.approx(0.475)
    assert adaptive_calibration_error(probs, labels, num_bins=2).item() == pytest.approx(0.525)
    assert adaptive_calibration_error(probs, labels, num_bins=15).item() == pytest.approx(0.525)
    # Of five points three are in the first of two bins: 0.6, 0.7, 0.8, of which one is right, and 0.9, 1.0.
    confidence = torch.tensor([0.9, 0.6, 1.0, 0.7, 0.8], dtype=torch.float64)
    probs = torch.stack([confidence, 1 - confidence], -1)
    labels = torch.tensor([0, 1, 0, 0, 1])
    expected = (abs(2.1 - 1) + abs(1.9 - 2)) / 5
    assert adaptive_calibration_error(probs, labels, num_bins=2).item() == pytest.approx(expected)


def test_bins_of_equal_mass_do_not_depend_on_the_order_of_the_points():
    probs, labels = simulate(400, 3)
    probs = (probs * 8).round()
    probs = probs / probs.sum(-1, keepdim=True)  # Few different confidences, many of exactly one.
    errors = [
        adaptive_calibration_error(probs[order], labels[order]).item()
        for order in (torch.randperm(400) for _ in range(5))
    ]
    assert errors == pytest.approx([errors[0]] * 5)
    certain = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    assert adaptive_calibration_error(certain, torch.tensor([0, 0, 1, 1]), num_bins=2).item() == 0.5


def test_bins_of_equal_mass_agree_with_scikit_learn():
    probs, labels = simulate(600, 2)
    labels[:100] = 0
    confidence, prediction = probs.max(-1)
    right, mean = calibration_curve((prediction == labels).numpy(), confidence.numpy(), n_bins=12, strategy="quantile")
    expected = np.abs(right - mean).mean()
    assert adaptive_calibration_error(probs, labels, num_bins=12).item() == pytest.approx(expected)


def test_bins_of_equal_mass_see_what_bins_of_equal_width_hide():
    """Nearly all confidences in the last bin: too sure below 0.99 and too little above."""
    confidence = torch.tensor([0.97, 0.99]).repeat(500)
    probs = torch.stack([confidence, 1 - confidence], -1)
    labels = torch.zeros(1000, dtype=torch.long)
    labels[0:80:2] = 1  # 40 wrong of the 500 at 0.97, none at 0.99: gaps of 0.05 and 0.01.
    assert expected_calibration_error(probs, labels).item() == pytest.approx(0.02, abs=1e-6)
    assert adaptive_calibration_error(probs, labels).item() == pytest.approx(0.03, abs=2e-3)
    assert adaptive_calibration_error(probs, labels, num_bins=2).item() == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize("metric", [expected_calibration_error, adaptive_calibration_error, reliability])
def test_num_bins_is_checked(metric):
    with pytest.raises(ValueError, match="num_bins"):
        metric(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]), num_bins=0)
