# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Accuracy against confidence: of predictions with confidence 0.9, nine of ten should be right."""

from dataclasses import dataclass

import torch

from pyro_radial._pyro.checks import non_negative_integer, positive_count
from pyro_radial.uncertainty._inputs import class_probabilities


@dataclass(frozen=True, eq=False)
class Reliability:
    """Accuracy against confidence, by bins of confidence, from :func:`reliability`.

    :param confidence: mean confidence in each bin, shape ``[B]``; NaN in empty bins.
    :param accuracy: share of right predictions in each bin, shape ``[B]``; NaN in empty bins.
    :param count: number of predictions in each bin, int64, shape ``[B]``.
    :param edges: edges of the bins, shape ``[B + 1]``; None for equally wide ones.
    :param of_class: the class; None for the top label.
    """

    confidence: torch.Tensor
    accuracy: torch.Tensor
    count: torch.Tensor
    edges: torch.Tensor | None = None
    of_class: int | None = None

    @property
    def expected_calibration_error(self) -> torch.Tensor:
        """Mean over predictions of the gap between accuracy and confidence in their bin, a 0-d tensor."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num()
        return (self.count * gap).sum() / self.count.sum()


def reliability(
    probs: torch.Tensor,
    labels: torch.Tensor,
    num_bins: int = 15,
    *,
    of_class: int | None = None,
    equal_counts: bool = False,
) -> Reliability:
    r"""Compute accuracy and mean confidence, of the top label or of one class, in bins of confidence.

    The confidence of a prediction is its largest probability. Bin :math:`b` of :math:`B` holds the confidences in
    :math:`((b - 1) / B, b / B]`, so a confidence of exactly 1 is in the last bin.

    With ``of_class`` the confidence is the probability of that class, and a prediction is right if the label is that
    class. Probabilities of a rare class are all in the first bin; with ``equal_counts`` each bin holds as many
    predictions as the others, up to ties.

    Source: Guo et al. (2017), *On Calibration of Modern Neural Networks*, section 2; Nguyen and O'Connor (2015),
    *Posterior calibration and exploratory analysis for natural language processing models*, section 3 (equal counts).

    :param probs: predictive probabilities, such as the mean of the softmax over posterior draws, floating-point of
        shape ``[N, K]``; rows sum to one within 0.001. Half precision is computed in float32.
    :param labels: true classes from 0 to K - 1, integers of shape ``[N]``.
    :param num_bins: number of bins, at least 1.
    :param of_class: a class, at least 0 and less than K, to compare it with all others; default the top label.
    :param equal_counts: whether bins hold equal numbers of predictions instead of being equally wide.
    :returns: a result with ``confidence``, ``accuracy`` and ``count`` of each bin, and the
        ``expected_calibration_error``; :func:`~pyro_radial.uncertainty.plots.plot_reliability` draws it.
    :raises ValueError: if shapes, values or types do not fit; the message names the argument.

    Example::

        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]])
        >>> bins = reliability(probs, torch.tensor([0, 1, 1]), num_bins=4)
        >>> bins.count
        tensor([0, 0, 1, 2])
        >>> bins.accuracy
        tensor([   nan,    nan, 1.0000, 0.5000])
    """
    probs, labels = class_probabilities(probs, labels)
    positive_count("num_bins", num_bins)
    num_classes = probs.shape[-1]
    confidence, prediction = probs.max(-1)
    if of_class is not None:
        if non_negative_integer("of_class", of_class) >= num_classes:
            raise ValueError(
                f"of_class must be less than {num_classes}, the number of classes, got {of_class}"
            )
        confidence = probs[:, of_class].contiguous()
        prediction = torch.full_like(labels, of_class)
    # Inner edges only: everything beyond the last edge, a confidence of 1 included, is in the last bin.
    steps = torch.arange(1, num_bins, device=probs.device)
    edges = steps.to(probs.dtype) / num_bins
    outer = None
    if equal_counts:
        last_ranks = (steps * len(probs)).div(num_bins, rounding_mode="floor") - 1
        edges = confidence.sort().values[last_ranks.clamp_min(0)]
        outer = torch.cat([edges.new_zeros(1), edges, edges.new_ones(1)])
    correct = (prediction == labels).to(probs.dtype)
    membership = torch.nn.functional.one_hot(torch.bucketize(confidence, edges), num_bins)
    count = membership.sum(0)
    # Sums instead of a matrix product, which a GPU may round to TensorFloat-32.
    sum_of_confidence = (membership * confidence[:, None]).sum(0)
    num_correct = (membership * correct[:, None]).sum(0)
    return Reliability(sum_of_confidence / count, num_correct / count, count, outer, of_class)


def expected_calibration_error(
    probs: torch.Tensor, labels: torch.Tensor, num_bins: int = 15
) -> torch.Tensor:
    r"""Compute the expected calibration error of the top label.

    .. math:: \sum_{b=1}^B \frac{n_b}{N} \, | \mathrm{acc}_b - \mathrm{conf}_b |

    with the bins of :func:`reliability`. On finitely many points a calibrated model has a value above zero, more so
    with more bins.

    Source: Naeini, Cooper and Hauskrecht (2015), *Obtaining Well Calibrated Probabilities Using Bayesian Binning*;
    Guo et al. (2017), equation 3.

    :param probs: predictive probabilities ``[N, K]``, as for :func:`reliability`.
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
