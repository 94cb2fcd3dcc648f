# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
import sys

import pytest
import torch
from sklearn.metrics import roc_auc_score

from pyro_radial.uncertainty import auroc, class_auroc, fpr_at_tpr
from tests.helpers.class_probabilities import simulate


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
    assert fpr_at_tpr(negative, positive, tpr=0.96) == 7 / 8
    assert fpr_at_tpr(negative, positive, tpr=0.01) == 1 / 8
    assert fpr_at_tpr(negative - 40, positive) == 0.0
    # On a straight line of the curve too, each threshold counts.
    assert fpr_at_tpr(positive, positive) == 0.95
    # Of positives that all score the same, none can be missed alone.
    assert fpr_at_tpr(torch.tensor([0.0, 1.0]), torch.ones(5)) == 0.5
    for tpr in (0.0, 1.0, 95):
        with pytest.raises(ValueError, match=f"fpr_at_tpr: tpr must be between zero and one, got {tpr}"):
            fpr_at_tpr(negative, positive, tpr=tpr)


def test_false_positives_of_a_shift_of_normals_are_in_closed_form():
    shift, number = 2.0, 200_000
    negative, positive = torch.randn(number), torch.randn(number) + shift
    normal = torch.distributions.Normal(0.0, 1.0)
    expected = 1 - normal.cdf(shift + normal.icdf(torch.tensor(0.05)))
    # The share is binomial, and the threshold as uncertain as the 0.05 quantile of the positives; five standard errors.
    slope = normal.log_prob(normal.icdf(1 - expected)).exp() / normal.log_prob(normal.icdf(torch.tensor(0.05))).exp()
    error = math.sqrt((expected * (1 - expected) + slope**2 * 0.05 * 0.95) / number)
    assert fpr_at_tpr(negative, positive) == pytest.approx(expected.item(), abs=5 * error)


def test_area_of_two_classes_is_that_of_the_second():
    probs, labels = simulate(200, 2)
    expected = auroc(probs[labels == 0, 1], probs[labels == 1, 1])
    assert class_auroc(probs, labels) == expected
    assert class_auroc(probs.flip(-1), labels) == pytest.approx(1 - expected)


def test_area_of_more_classes_is_the_mean_of_one_against_the_rest():
    probs, labels = simulate(300, 4)
    expected = roc_auc_score(labels.numpy(), probs.numpy(), multi_class="ovr")
    assert class_auroc(probs, labels) == pytest.approx(expected)
    # Rows that sum to one only nearly are as good, where scikit-learn refuses them.
    assert class_auroc((probs * 1.0005).float(), labels) == pytest.approx(expected)


def test_a_missing_class_leaves_no_area():
    probs, labels = simulate(50, 4)
    with pytest.raises(ValueError, match=r"labels must hold every class from 0 to 3.* got none of \[1, 3\] in"):
        class_auroc(probs, 2 * (labels // 2))
    with pytest.raises(ValueError, match="probs must have at least two classes"):
        class_auroc(torch.ones(3, 1), torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("bad", [torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, math.nan])])
def test_bad_scores_are_named(bad):
    good = torch.tensor([0.0, 1.0])
    for metric in (auroc, fpr_at_tpr):
        with pytest.raises(ValueError, match="scores_negative"):
            metric(bad, good)
        with pytest.raises(ValueError, match="scores_positive"):
            metric(good, bad)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    for metric in (auroc, fpr_at_tpr):
        with pytest.raises(ImportError, match=rf"{metric.__name__} needs .*pyro-radial\[data\]"):
            metric(torch.zeros(2), torch.ones(2))
