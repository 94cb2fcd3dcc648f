# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of class probabilities, and of a score that should tell two sets apart."""

import math

import torch

from pyro_radial.uncertainty._inputs import class_probabilities, finite_numbers

# SciPy and scikit-learn work on NumPy arrays, so the scores of probabilities are written in torch: they run on any
# device and have gradients.

#: The true positive rate of :func:`fpr_at_tpr`.
TPR = 0.95


def accuracy(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the share of points whose most probable class is the label, a 0-d tensor.

    :param probs: predictive probabilities, such as the mean of the softmax over posterior draws, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.
    """
    probs, labels = class_probabilities(probs, labels)
    return (probs.argmax(-1) == labels).to(probs.dtype).mean()


def brier_score(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    r"""Compute the mean squared distance between the probabilities and the one-hot label.

    .. math:: \frac{1}{N} \sum_{n=1}^N \sum_{k=1}^K (p_{nk} - [y_n = k])^2

    This is Brier's own definition, from 0 to 2: for two classes it is twice the score that looks at one class. The
    arguments are those of :func:`accuracy`.

    Source: Brier (1950), *Verification of forecasts expressed in terms of probability*.
    """
    probs, labels = class_probabilities(probs, labels)
    return (probs - torch.nn.functional.one_hot(labels, probs.shape[-1])).square().sum(-1).mean()


def auroc(scores_negative: torch.Tensor, scores_positive: torch.Tensor) -> float:
    r"""Compute the area under the ROC curve for telling two sets apart by a score.

    It is the probability that a random positive scores higher than a random negative, ties counting one half. To
    measure how well a model notices unfamiliar points, pass the predictive entropy of familiar points as
    ``scores_negative`` and that of unfamiliar points as ``scores_positive``.

    :param scores_negative: scores of the negatives, shape ``[N0]``.
    :param scores_positive: scores of the positives, shape ``[N1]``.
    :returns: a number in ``[0, 1]``; 0.5 is chance.
    :raises ValueError: if an argument is not one-dimensional, is empty or is not finite.

    Example::

        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.3]))
        0.75
    """
    # Its import takes a second.
    from scipy.stats import rankdata

    negative = finite_numbers("scores_negative", scores_negative)
    positive = finite_numbers("scores_positive", scores_positive)
    ranks = rankdata(torch.cat([positive, negative]).numpy())
    # Over all pairs; the ranks of the positives also count the positives below them.
    num_above = ranks[: len(positive)].sum() - 0.5 * len(positive) * (len(positive) + 1)
    return float(num_above / (len(positive) * len(negative)))


def fpr_at_tpr(scores_negative: torch.Tensor, scores_positive: torch.Tensor) -> float:
    r"""Compute the false positive rate of a score at a true positive rate of 95 %.

    The threshold is the highest one that still finds 95 % of the positives; the result is the share of the negatives
    that reach it. As for :func:`auroc`, unfamiliar points are the positives. Much work on
    out-of-distribution detection calls familiar points positive: for that convention, swap the arguments and negate
    the scores.

    Source: Liang, Li and Srikant (2018), *Enhancing the reliability of out-of-distribution image detection in neural
    networks*.
    """
    negative = finite_numbers("scores_negative", scores_negative)
    positive = finite_numbers("scores_positive", scores_positive)
    num_found = math.ceil(TPR * len(positive))
    threshold = positive.sort(descending=True).values[num_found - 1]
    return float((negative >= threshold).double().mean())
