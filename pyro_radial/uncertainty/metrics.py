# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How good are predictive probabilities: scores, calibration, and telling two sets apart."""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from pyro_radial._checks import positive_count

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "brier_score",
    "expected_calibration_error",
    "negative_log_likelihood",
    "reliability",
]

# Scores of probabilities are torch's own few lines, on any device and with gradients; scikit-learn, which computes on
# NumPy arrays and clips the logarithm, serves auroc alone.

SUM_TOLERANCE = 1e-3


def accuracy(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    r"""Fraction of points whose most probable class is the label.

    :param probs: predictive probabilities, such as the mean of the softmax over posterior samples, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :returns: 0-d tensor in ``[0, 1]``.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.

    Example::

        >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    probs, labels = _check(probs, labels)
    return (probs.argmax(-1) == labels).to(probs.dtype).mean()


def negative_log_likelihood(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    r"""Mean negative log predictive probability of the labels, in nats per point.

    .. math:: -\frac{1}{N} \sum_{n=1}^N \log p_{n, y_n}

    It is infinite if a label has probability zero; nothing is clipped.

    :param probs: predictive probabilities, such as the mean of the softmax over posterior samples, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :returns: 0-d tensor, nats.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.

    Example::

        >>> negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([0, 1]))
        tensor(1.0397)
    """
    probs, labels = _check(probs, labels)
    return -probs.gather(-1, labels[:, None]).log().mean()


def brier_score(probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    r"""Mean squared distance between the probabilities and the one-hot label.

    .. math:: \frac{1}{N} \sum_{n=1}^N \sum_{k=1}^K (p_{nk} - [y_n = k])^2

    This is Brier's own definition, from 0 to 2: for two classes it is twice the score that looks at one class.

    Source: Brier (1950), *Verification of forecasts expressed in terms of probability*.

    :param probs: predictive probabilities, such as the mean of the softmax over posterior samples, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :returns: 0-d tensor in ``[0, 2]``.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.

    Example::

        >>> brier_score(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([0, 1]))
        tensor(1.2500)
    """
    probs, labels = _check(probs, labels)
    return (probs - one_hot(labels, probs.shape[-1])).square().sum(-1).mean()


@dataclass(frozen=True, eq=False)
class Reliability:
    """Accuracy against confidence, by bins of confidence; made by :func:`reliability`.

    :param confidence: mean confidence in each bin, shape ``[B]``; NaN in empty bins.
    :param accuracy: fraction of right predictions in each bin, shape ``[B]``; NaN in empty bins.
    :param count: number of predictions in each bin, int64, shape ``[B]``.
    """

    confidence: torch.Tensor
    accuracy: torch.Tensor
    count: torch.Tensor

    @property
    def expected_calibration_error(self) -> torch.Tensor:
        """Mean over predictions of the gap between accuracy and confidence of their bin.

        :returns: 0-d tensor in ``[0, 1]``.
        """
        gap = (self.accuracy - self.confidence).abs().nan_to_num()
        return (self.count * gap).sum() / self.count.sum()


def reliability(probs: torch.Tensor, labels: torch.Tensor, num_bins: int = 15) -> Reliability:
    r"""Accuracy and mean confidence of the top label, in equally wide bins of confidence.

    The confidence of a prediction is its largest probability. Bin :math:`b` of :math:`B` holds the confidences in
    :math:`((b - 1) / B, b / B]`, so a confidence of exactly 1 is in the last bin.

    Source: Guo et al. (2017), *On Calibration of Modern Neural Networks*, section 2.

    :param probs: predictive probabilities, such as the mean of the softmax over posterior samples, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :param num_bins: number of bins, at least 1.
    :returns: what each bin holds.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.

    Example::

        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
        >>> bins = reliability(probs, torch.tensor([0, 1, 1]), num_bins=4)
        >>> bins.count
        tensor([0, 0, 1, 2])
        >>> bins.accuracy
        tensor([   nan,    nan, 1.0000, 0.5000])
    """
    probs, labels = _check(probs, labels)
    positive_count("num_bins", num_bins)
    confidence, prediction = probs.max(-1)
    # Inner edges only: whatever is beyond the last of them, a confidence of 1 included, is in the last bin.
    edges = torch.arange(1, num_bins, dtype=probs.dtype, device=probs.device) / num_bins
    membership = one_hot(torch.bucketize(confidence, edges), num_bins)
    count = membership.sum(0)
    correct = (prediction == labels).to(probs.dtype)
    # Sums without a matrix product, which a GPU may round to TensorFloat-32.
    sums = [(membership * values[:, None]).sum(0) for values in (confidence, correct)]
    return Reliability(confidence=sums[0] / count, accuracy=sums[1] / count, count=count)


def expected_calibration_error(probs: torch.Tensor, labels: torch.Tensor, num_bins: int = 15) -> torch.Tensor:
    r"""Expected calibration error of the top label.

    .. math:: \sum_{b=1}^B \frac{n_b}{N} \, | \mathrm{acc}_b - \mathrm{conf}_b |

    with the bins of :func:`reliability`. A calibrated model has a value above zero on finitely many points, more so
    with more bins.

    Source: Naeini, Cooper and Hauskrecht (2015), *Obtaining Well Calibrated Probabilities Using Bayesian Binning*;
    Guo et al. (2017), equation 3.

    :param probs: predictive probabilities, such as the mean of the softmax over posterior samples, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :param num_bins: number of bins, at least 1.
    :returns: 0-d tensor in ``[0, 1]``.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.

    Example::

        >>> probs = torch.tensor([[0.95, 0.05], [0.0, 1.0]])
        >>> expected_calibration_error(probs, torch.tensor([0, 0]), num_bins=10)
        tensor(0.4750)
    """
    return reliability(probs, labels, num_bins).expected_calibration_error


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
    try:
        from sklearn.metrics import roc_auc_score
    except ImportError as error:
        raise ImportError("auroc needs scikit-learn: pip install 'pyro-radial[data]'") from error
    for name, scores in (("scores_negative", scores_negative), ("scores_positive", scores_positive)):
        if scores.ndim != 1 or len(scores) == 0:
            raise ValueError(f"{name} must have shape [N] with N > 0, got {list(scores.shape)}")
        if not scores.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    # Float64 holds every float16, bfloat16 and float32 exactly, so ties stay ties.
    scores = torch.cat([scores_negative.detach().cpu().double(), scores_positive.detach().cpu().double()])
    truth = torch.arange(len(scores)) >= len(scores_negative)
    return float(roc_auc_score(truth.numpy(), scores.numpy()))


def _check(probs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in float32 or wider and int64 labels, or a ValueError that names the argument."""
    if probs.ndim != 2 or 0 in probs.shape or not probs.is_floating_point():
        raise ValueError(f"probs must be floating-point of shape [N, K], got {probs.dtype} {list(probs.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != probs.shape[:1]:
        raise ValueError(f"labels must have shape [{len(probs)}] to fit probs, got {list(labels.shape)}")
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    if probs.isnan().any() or (probs < 0).any():
        raise ValueError(f"probs must be non-negative, got {probs.min().item():.3g}")
    error = (probs.sum(-1) - 1).abs().max()
    if error > SUM_TOLERANCE:
        raise ValueError(f"probs must sum to one in every row, got a row that is off by {error.item():.3g}")
    if (labels < 0).any() or (labels >= probs.shape[-1]).any():
        raise ValueError(
            f"labels must be from 0 to {probs.shape[-1] - 1}, got {int(labels.min())} to {int(labels.max())}"
        )
    return probs, labels.long()
