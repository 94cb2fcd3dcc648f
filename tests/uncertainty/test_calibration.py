# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0


import pytest
import torch

from pyro_radial.uncertainty import reliability


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
    # Certainty belongs to the last bin.
    assert reliability(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), num_bins=4).count.tolist() == [0, 0, 0, 1]


def test_one_class_against_the_others_by_hand():
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]])
    bins = reliability(probs, torch.tensor([0, 1, 1, 1]), num_bins=2, of_class=1)
    # Probabilities of class 1: 0.2, 0.3 and 0.3 in the first half, of which two are right, and 0.8 in the second.
    assert bins.count.tolist() == [3, 1]
    torch.testing.assert_close(bins.confidence, torch.tensor([0.8 / 3, 0.8]))
    torch.testing.assert_close(bins.accuracy, torch.tensor([2 / 3, 1.0]))
    assert bins.expected_calibration_error.item() == pytest.approx((3 * (2 / 3 - 0.8 / 3) + 0.2) / 4)


def test_a_rare_class_fills_all_bins_of_equal_counts_and_one_of_equal_width():
    rare = 0.02 * torch.rand(10_000)
    probs, labels = torch.stack([1 - rare, rare], -1), (torch.rand(10_000) < rare).long()
    assert reliability(probs, labels, of_class=1).count.tolist() == [10_000] + [0] * 14
    bins = reliability(probs, labels, num_bins=10, of_class=1, equal_counts=True)
    assert bins.count.tolist() == [1_000] * 10
    assert bool((bins.confidence.diff() > 0).all())
    torch.testing.assert_close(bins.edges[1:-1], rare.sort().values[999:9_999:1_000])
    # Three standard errors of a share of at most 0.02 among a thousand.
    assert (bins.accuracy - bins.confidence).abs().max() < 3 * (0.02 / 1_000) ** 0.5
    equal, wide = (reliability(probs, labels, num_bins=1, equal_counts=equal_counts) for equal_counts in (True, False))
    torch.testing.assert_close((equal.accuracy, equal.confidence), (wide.accuracy, wide.confidence))


def test_equal_counts_take_ties_and_few_predictions():
    probs, labels = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0, 1, 1])
    assert reliability(probs, labels, num_bins=2, equal_counts=True).count.tolist() in ([3, 1], [4, 0])
    many = reliability(probs, labels, num_bins=9, equal_counts=True)
    assert int(many.count.sum()) == 4
    torch.testing.assert_close(many.accuracy.nansum(), torch.tensor(2 / 3 + 1.0))
