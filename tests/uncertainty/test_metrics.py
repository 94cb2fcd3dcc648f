# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from pyro_radial.uncertainty import auroc, expected_calibration_error, reliability
from pyro_radial.uncertainty.metrics import accuracy, brier_score, fpr_at_tpr
from tests.helpers.predictions import simulate


def test_worked_by_hand():
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.0, 0.8]])
    labels = torch.tensor([0, 1, 2, 2])
    assert accuracy(probs, labels).item() == 0.75
    # Rows: 0.25 + 0.0625 + 0.0625, 0.01 + 0.09 + 0.04, 0.36 + 0.09 + 0.81, 0.04 + 0.04.
    assert brier_score(probs, labels).item() == pytest.approx((0.375 + 0.14 + 1.26 + 0.08) / 4, rel=1e-6)
    # Two bins: 0.5 alone and right; 0.7, 0.6, 0.8 with two of three right.
    bins = reliability(probs, labels, num_bins=2)
    assert bins.count.tolist() == [1, 3]
    torch.testing.assert_close(bins.confidence, torch.tensor([0.5, 0.7]))
    torch.testing.assert_close(bins.accuracy, torch.tensor([1.0, 2 / 3]))
    expected = 0.25 * 0.5 + 0.75 * (0.7 - 2 / 3)
    assert expected_calibration_error(probs, labels, num_bins=2).item() == pytest.approx(expected, rel=1e-5)


def test_binary_case_agrees_with_scikit_learn():
    probs, labels = simulate(500, 2)
    labels[:100] = 0
    expected = 2 * brier_score_loss(labels.numpy(), probs[:, 1].numpy())
    assert brier_score(probs, labels).item() == pytest.approx(expected)
    # For two classes the top label's calibration is that of the event "the top label is right".
    confidence, prediction = probs.max(-1)
    right, mean = calibration_curve((prediction == labels).numpy(), confidence.numpy(), n_bins=10)
    bins = reliability(probs, labels, num_bins=10)
    filled = bins.count > 0
    assert bins.accuracy[filled].tolist() == pytest.approx(right.tolist())
    assert bins.confidence[filled].tolist() == pytest.approx(mean.tolist())
    assert filled.tolist() == [False] * 5 + [True] * 5


def test_auroc_counts_pairs():
    negative, positive = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.5, 0.7])
    # Of six pairs 0.5 wins one and ties one, 0.7 wins two.
    assert auroc(negative, positive) == pytest.approx(3.5 / 6)
    assert auroc(positive, negative) == pytest.approx(2.5 / 6)
    assert auroc(torch.zeros(3), torch.ones(2, requires_grad=True)) == 1.0
    assert isinstance(auroc(negative, positive), float)


def test_false_positives_at_a_rate_of_true_positives():
    """Twenty positives of which nineteen must be found: the threshold is the second lowest."""
    positive = torch.arange(20.0)
    negative = torch.tensor([-1.0, 0.0, 0.5, 0.99, 1.0, 3.0, 30.0, 2.0])
    assert fpr_at_tpr(negative, positive) == 4 / 8
    assert fpr_at_tpr(negative - 40, positive) == 0.0
    # On a straight line of the curve too, each threshold counts.
    assert fpr_at_tpr(positive, positive) == 0.95
    # Of positives that all score the same, none can be missed alone.
    assert fpr_at_tpr(torch.tensor([0.0, 1.0]), torch.ones(5)) == 0.5


@pytest.mark.parametrize("metric", [accuracy, brier_score, expected_calibration_error, reliability])
def test_arrays_are_named(metric):
    probs, labels = simulate(20, 2)
    for name, arguments in (("probs", (probs.numpy(), labels)), ("labels", (probs, labels.numpy()))):
        with pytest.raises(ValueError, match=f"{name} must be a Tensor, got ndarray"):
            metric(*arguments)
