# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How good are predictive probabilities of classes: scores that average over points."""

import torch
from torch.nn.functional import one_hot

from pyro_radial.uncertainty._inputs import class_probabilities

__all__ = ["accuracy", "brier_score", "negative_log_likelihood"]

# Scores of probabilities are torch's own few lines, on any device and with gradients; scikit-learn computes on NumPy
# arrays and clips the logarithm.


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
    probs, labels = class_probabilities(probs, labels)
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
    probs, labels = class_probabilities(probs, labels)
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
    probs, labels = class_probabilities(probs, labels)
    return (probs - one_hot(labels, probs.shape[-1])).square().sum(-1).mean()
