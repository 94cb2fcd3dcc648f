# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from pyro_radial.uncertainty import expected_calibration_error, reliability
from tests.helpers.class_probabilities import simulate


def test_certainty_belongs_to_the_last_bin():
    probs = torch.tensor([[0.95, 0.05], [1.0, 0.0]])
    labels = torch.tensor([0, 1])
    assert reliability(probs, labels, num_bins=10).count.tolist() == [0] * 9 + [2]
    assert expected_calibration_error(probs, labels, num_bins=10).item() == pytest.approx(0.475)


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
