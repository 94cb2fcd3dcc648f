# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from pyro_radial.uncertainty import (
    accuracy,
    auroc,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
)

METRICS = [accuracy, negative_log_likelihood, brier_score, expected_calibration_error, reliability]


def simulate(num_points, num_classes, seed=0):
    """Probabilities and labels drawn from them, so the probabilities are calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_points, num_classes, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


def test_worked_by_hand():
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.7, 0.2], [0.6, 0.3, 0.1], [0.2, 0.0, 0.8]])
    labels = torch.tensor([0, 1, 2, 2])
    assert accuracy(probs, labels).item() == 0.75
    expected = -(math.log(0.5) + math.log(0.7) + math.log(0.1) + math.log(0.8)) / 4
    assert negative_log_likelihood(probs, labels).item() == pytest.approx(expected, rel=1e-6)
    # Rows: 0.25 + 0.0625 + 0.0625, 0.01 + 0.09 + 0.04, 0.36 + 0.09 + 0.81, 0.04 + 0.04.
    assert brier_score(probs, labels).item() == pytest.approx((0.375 + 0.14 + 1.26 + 0.08) / 4, rel=1e-6)
    # Two bins: 0.5 alone and right; 0.7, 0.6, 0.8 with two of three right.
    bins = reliability(probs, labels, num_bins=2)
    assert bins.count.tolist() == [1, 3]
    torch.testing.assert_close(bins.confidence, torch.tensor([0.5, 0.7]))
    torch.testing.assert_close(bins.accuracy, torch.tensor([1.0, 2 / 3]))
    expected = 0.25 * 0.5 + 0.75 * (0.7 - 2 / 3)
    assert expected_calibration_error(probs, labels, num_bins=2).item() == pytest.approx(expected, rel=1e-5)


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


def test_agrees_with_scikit_learn():
    probs, labels = simulate(500, 4)
    labels[:100] = 0  # Away from calibration, so that no score is at a special value.
    assert accuracy(probs, labels).item() == pytest.approx(accuracy_score(labels, probs.argmax(-1)))
    expected = log_loss(labels.numpy(), probs.numpy(), labels=range(4))
    assert negative_log_likelihood(probs, labels).item() == pytest.approx(expected)


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


def test_multi_class_brier_score_is_the_sum_over_classes():
    probs, labels = simulate(300, 5)
    expected = sum(brier_score_loss((labels == k).numpy(), probs[:, k].numpy()) for k in range(5))
    assert brier_score(probs, labels).item() == pytest.approx(expected)


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


def test_negative_log_likelihood_of_the_impossible_is_infinite():
    probs = torch.tensor([[1.0, 0.0]])
    assert negative_log_likelihood(probs, torch.tensor([1])).item() == math.inf
    assert negative_log_likelihood(probs, torch.tensor([0])).item() == 0


def test_half_precision_is_computed_in_single_precision():
    probs = torch.tensor([[0.7, 0.3]], dtype=torch.float16)
    rounded = probs[0, 0].item()
    labels = torch.zeros(1, dtype=torch.uint8)
    assert negative_log_likelihood(probs, labels).item() == pytest.approx(-math.log(rounded), rel=1e-6)
    assert expected_calibration_error(probs, labels).item() == pytest.approx(1 - rounded, rel=1e-6)


def test_scores_are_tensors_with_gradients():
    logits = torch.randn(5, 3, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0, 1])
    for metric in (negative_log_likelihood, brier_score):
        score = metric(logits.softmax(-1), labels)
        assert score.shape == ()
        (gradient,) = torch.autograd.grad(score, logits)
        assert gradient.abs().max() > 0


def test_auroc_counts_pairs():
    negative, positive = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.5, 0.7])
    # Of six pairs 0.5 wins one and ties one, 0.7 wins two.
    assert auroc(negative, positive) == pytest.approx(3.5 / 6)
    assert auroc(positive, negative) == pytest.approx(2.5 / 6)
    assert auroc(torch.zeros(3), torch.ones(2, requires_grad=True)) == 1.0
    assert isinstance(auroc(negative, positive), float)


@pytest.mark.parametrize("bad", [torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, math.nan])])
def test_auroc_names_the_bad_argument(bad):
    good = torch.tensor([0.0, 1.0])
    with pytest.raises(ValueError, match="scores_negative"):
        auroc(bad, good)
    with pytest.raises(ValueError, match="scores_positive"):
        auroc(good, bad)


def test_auroc_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(ImportError, match=r"pyro-radial\[data\]"):
        auroc(torch.zeros(2), torch.ones(2))


GOOD = torch.tensor([[0.5, 0.5], [0.2, 0.8]])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (GOOD[0], torch.tensor([0, 1]), "probs must be floating-point of shape"),
        (GOOD.long(), torch.tensor([0, 1]), "probs must be floating-point"),
        (GOOD[:0], torch.tensor([], dtype=torch.int64), "probs must be floating-point of shape"),
        (torch.tensor([[math.nan, 1.0], [0.5, 0.5]]), torch.tensor([0, 1]), "probs must be non-negative, got nan"),
        (torch.tensor([[-0.1, 1.1], [0.5, 0.5]]), torch.tensor([0, 1]), "probs must be non-negative, got -0.1"),
        (torch.tensor([[0.5, 0.502], [0.5, 0.5]]), torch.tensor([0, 1]), "probs must sum to one"),
        (torch.tensor([[math.inf, 0.0], [0.5, 0.5]]), torch.tensor([0, 1]), "probs must sum to one"),
        (GOOD, torch.tensor([0]), "labels must have shape"),
        (GOOD, torch.tensor([[0], [1]]), "labels must have shape"),
        (GOOD, torch.tensor([0.0, 1.0]), "labels must be integers"),
        (GOOD, torch.tensor([True, False]), "labels must be integers"),
        (GOOD, torch.tensor([0, 2]), "labels must be from 0 to 1"),
        (GOOD, torch.tensor([-1, 0]), "labels must be from 0 to 1"),
    ],
)
def test_bad_arguments_are_named(metric, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        metric(probs, labels)


@pytest.mark.parametrize("metric", [expected_calibration_error, reliability])
def test_num_bins_is_checked(metric):
    with pytest.raises(ValueError, match="num_bins"):
        metric(GOOD, torch.tensor([0, 1]), num_bins=0)


def test_small_rounding_of_probabilities_is_accepted():
    assert accuracy(torch.tensor([[0.5, 0.5005]]), torch.tensor([1])).item() == 1
