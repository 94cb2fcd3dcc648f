# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Does a score tell two sets apart: the area under the ROC curve, and a point of that curve."""

from typing import Any

import torch

from pyro_radial._pyro.checks import proper_fraction
from pyro_radial.uncertainty._inputs import class_probabilities, finite_numbers

__all__ = ["auroc", "class_auroc", "fpr_at_tpr"]


def auroc(scores_negative: torch.Tensor, scores_positive: torch.Tensor) -> float:
    r"""Area under the ROC curve for telling two sets apart by a score.

    It is the probability that a random positive scores higher than a random negative, ties counting one half. With
    the predictive entropy of familiar points as ``scores_negative`` and of unfamiliar ones as ``scores_positive``,
    it says how well the model notices what it does not know.

    :param scores_negative: scores of the negatives, shape ``[N0]``.
    :param scores_positive: scores of the positives, shape ``[N1]``.
    :returns: a number in ``[0, 1]``; 0.5 is chance.
    :raises ValueError: if an argument is not one-dimensional, is empty or is not finite.
    :raises ImportError: without scikit-learn.

    Example::

        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.3]))
        0.75
    """
    metrics = _sklearn_metrics("auroc")
    return float(metrics.roc_auc_score(*_pooled(scores_negative, scores_positive)))


def class_auroc(probs: torch.Tensor, labels: torch.Tensor) -> float:
    r"""Area under the ROC curve of class probabilities.

    For two classes it is that of the probability of class 1; for more it is the mean over classes of one class against
    the rest, each class counting the same however rare it is.

    :param probs: predictive probabilities, floating-point of shape ``[N, K]``; rows sum to one within 0.001.
    :param labels: true classes from 0 to K - 1, each at least once, integers of shape ``[N]``.
    :returns: a number in ``[0, 1]``; 0.5 is chance.
    :raises ValueError: if shapes, values or types do not fit, or a class is missing among the labels, for then there is
        no such area; the message names the argument.
    :raises ImportError: without scikit-learn.

    Example::

        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.85, 0.15], [0.7, 0.3]])
        >>> class_auroc(probs, torch.tensor([0, 0, 1, 1]))
        0.75
    """
    probs, labels = class_probabilities(probs, labels)
    num_classes = probs.shape[-1]
    if num_classes < 2:
        raise ValueError(f"class_auroc: probs must have at least two classes, got shape {list(probs.shape)}")
    missing = sorted(set(range(num_classes)) - set(labels.tolist()))
    if missing:
        raise ValueError(
            f"class_auroc: labels must hold every class from 0 to {num_classes - 1}, for the area is not defined "
            f"without, got none of {missing} in {len(labels)} labels"
        )
    counted = [1] if num_classes == 2 else range(num_classes)
    return sum(auroc(probs[labels != k, k], probs[labels == k, k]) for k in counted) / len(counted)


def fpr_at_tpr(scores_negative: torch.Tensor, scores_positive: torch.Tensor, tpr: float = 0.95) -> float:
    r"""False positive rate at a true positive rate: the share of negatives that a threshold on a score lets through.

    The threshold is the highest that still finds a share ``tpr`` of the positives; what scores at or above it is taken
    for positive. Like :func:`auroc`, it takes unfamiliar points as the positives. Where familiar points are to be
    the positives, as in much work on out-of-distribution detection, swap the arguments and turn the signs.

    Source: Liang, Li and Srikant (2018), *Enhancing the reliability of out-of-distribution image detection in neural
    networks*.

    :param scores_negative: scores of the negatives, shape ``[N0]``.
    :param scores_positive: scores of the positives, shape ``[N1]``.
    :param tpr: the share of the positives to find, between 0 and 1.
    :returns: a number in ``[0, 1]``; 0 is best, ``tpr`` is chance.
    :raises ValueError: if a score is not one-dimensional, is empty or is not finite, or ``tpr`` is out of range.
    :raises ImportError: without scikit-learn.

    Example::

        >>> familiar, unfamiliar = torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.7, 0.8, 0.9])
        >>> fpr_at_tpr(familiar, unfamiliar), fpr_at_tpr(familiar, unfamiliar, tpr=0.75)
        (0.25, 0.0)
    """
    metrics = _sklearn_metrics("fpr_at_tpr")
    proper_fraction("fpr_at_tpr: tpr", tpr)
    false, true, _ = metrics.roc_curve(*_pooled(scores_negative, scores_positive), drop_intermediate=False)
    return float(false[true >= tpr].min())


def _pooled(scores_negative: torch.Tensor, scores_positive: torch.Tensor) -> tuple[Any, Any]:
    """Which are positives, and the scores, both as arrays."""
    negative = finite_numbers("scores_negative", scores_negative)
    positive = finite_numbers("scores_positive", scores_positive)
    scores = torch.cat([negative, positive])
    return (torch.arange(len(scores)) >= len(negative)).numpy(), scores.numpy()


def _sklearn_metrics(who: str) -> Any:
    try:
        import sklearn.metrics
    except ImportError as error:
        raise ImportError(f"{who} needs scikit-learn: pip install 'pyro-radial[data]'") from error
    return sklearn.metrics
