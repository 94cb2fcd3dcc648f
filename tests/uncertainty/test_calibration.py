# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_radial.uncertainty import expected_calibration_error, reliability
from pyro_radial.uncertainty.metrics import accuracy
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


@pytest.mark.parametrize("metric", [expected_calibration_error, reliability])
def test_num_bins_is_checked(metric):
    with pytest.raises(ValueError, match="num_bins"):
        metric(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]), num_bins=0)
