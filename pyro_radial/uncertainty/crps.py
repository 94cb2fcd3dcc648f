# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The continuous ranked probability score, of draws and of mixtures of normals.

It is the squared distance between the predictive and the empirical distribution function, in the units of the target.
"""

import math

import torch

from pyro_radial.uncertainty._inputs import real_targets

__all__ = ["crps_from_draws", "crps_normal"]


def crps_from_draws(draws: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    r"""Mean continuous ranked probability score, estimated without bias from independent draws.

    .. math:: \frac{1}{S} \sum_s |x_s - y| - \frac{1}{2 S (S - 1)} \sum_{s \ne t} |x_s - x_t|

    an estimate of :math:`\int (F(z) - [y \le z])^2 dz = E|X - y| - \frac{1}{2} E|X - X'|`. The divisor S - 1 makes it
    the fair score: with S in its place fewer draws would score worse. The draws must be independent given the input:
    those of :meth:`Prediction.sample_targets() <pyro_radial.infer.Prediction.sample_targets>`, one for each function.
    A single estimate may be below zero.

    Source: Gneiting and Raftery (2007), *Strictly Proper Scoring Rules, Prediction, and Estimation*, equation 21; Ferro
    (2014), *Fair scores for ensemble forecasts*.

    :param draws: S draws of the target at each input, ``[S, N, *target]`` with S at least 2.
    :param targets: ``[N, *target]``; ``[N]`` stands for ``[N, 1]``.
    :returns: 0-d tensor, the mean over targets, in their units.
    :raises ValueError: if shapes do not fit or a value is not finite.

    Example::

        >>> crps_from_draws(torch.tensor([[0.0], [2.0], [1.0]]), torch.tensor([1.0]))
        tensor(0.)
    """
    number = len(draws) if draws.ndim > 1 else 0
    if number < 2:
        raise ValueError(f"crps_from_draws: draws must have shape [S, N, ...] with S > 1, got {list(draws.shape)}")
    targets = real_targets("crps_from_draws", "draws", draws, targets, leading=1)
    # Around the target, so that draws far from zero lose no digits.
    gaps = (draws - targets).sort(0).values
    # In order, the s-th of S is larger than s - 1 others and smaller than S - s.
    weights = 2 * torch.arange(1, number + 1, dtype=gaps.dtype, device=gaps.device) - number - 1
    spread = (weights.reshape(-1, *[1] * (gaps.ndim - 1)) * gaps).sum(0) / (number * (number - 1))
    return (gaps.abs().mean(0) - spread).mean()


def crps_normal(loc: torch.Tensor, scale: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    r"""Mean continuous ranked probability score of an equal mixture of normal distributions, in closed form.

    .. math:: \frac{1}{S} \sum_s A(y - \mu_s, \sigma_s^2) - \frac{1}{2 S^2} \sum_{s, t} A(\mu_s - \mu_t, \sigma_s^2 +
        \sigma_t^2), \qquad
        A(m, v) = E|N(m, v)| = m \, \mathrm{erf}\frac{m}{\sqrt{2 v}} + \sqrt{\frac{2 v}{\pi}} \, e^{-m^2 / 2 v}

    It is the score of the draws as they are, of S functions with normal noise. With S = 1 it is that of one normal
    distribution. It takes time of the order of S squared, and memory of the order of S.

    Source: Grimit et al. (2006), *The continuous ranked probability score for circular variables and its application to
    mesoscale forecast ensemble verification*.

    :param loc: means :math:`\mu`, such as ``Prediction.samples``, ``[S, N, *target]``.
    :param scale: positive standard deviations :math:`\sigma`, of a shape that broadcasts with that of ``loc``.
    :param targets: ``[N, *target]``; ``[N]`` stands for ``[N, 1]``.
    :returns: 0-d tensor, the mean over targets, in their units.
    :raises ValueError: if shapes do not fit, a value is not finite or a scale not positive.

    Example::

        >>> crps_normal(torch.zeros(1, 1), torch.ones(1, 1), torch.tensor([0.0]))
        tensor(0.2337)
    """
    if loc.ndim < 2 or len(loc) == 0:
        raise ValueError(f"crps_normal: loc must have shape [S, N, ...] with S > 0, got {list(loc.shape)}")
    targets = real_targets("crps_normal", "loc", loc, targets, leading=1)
    if not ((scale > 0) & scale.isfinite()).all():
        raise ValueError(f"crps_normal: scale must be positive and finite, got {scale.min().item():.3g}")
    try:
        variance = scale.square().expand(loc.shape)
    except RuntimeError as error:
        raise ValueError(
            f"crps_normal: scale must broadcast to the shape of loc, {list(loc.shape)}, got {list(scale.shape)}"
        ) from error
    pairs = torch.zeros_like(targets)
    for mean, own in zip(loc, variance, strict=True):
        pairs = pairs + _mean_absolute(loc - mean, variance + own).mean(0)
    return (_mean_absolute(targets - loc, variance).mean(0) - pairs / (2 * len(loc))).mean()


def _mean_absolute(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """E|X| of a normal X."""
    root = (2 * variance).sqrt()
    ratio = mean / root
    return mean * torch.erf(ratio) + root * torch.exp(-ratio.square()) / math.sqrt(math.pi)
