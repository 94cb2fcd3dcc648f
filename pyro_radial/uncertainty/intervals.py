# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of predictive distributions of real targets: of intervals, of quantiles and of draws."""

from dataclasses import dataclass
from typing import Any

import torch

from pyro_radial._pyro.checks import held_numbers
from pyro_radial.uncertainty._inputs import real_targets


def interval_coverage(
    lower: torch.Tensor, upper: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    r"""Compute the share of targets within their predictive intervals, ends included.

    .. math:: \frac{1}{N} \sum_{n=1}^N [l_n \le y_n \le u_n]

    For intervals from the quantile at (1 - c) / 2 to that at (1 + c) / 2 it should be c. Wide intervals cover
    everything, so report their mean width too.

    :param lower: lower ends, ``[*L, N, *target]``, such as quantiles at several levels.
    :param upper: upper ends, of the same shape.
    :param targets: ``[N, *target]``; ``[N]`` stands for ``[N, 1]``.
    :returns: a tensor ``[*L]``.
    :raises ValueError: if shapes do not fit, a value is NaN, or a lower end is above its upper end.

    Example::

        >>> lower = torch.tensor([[0.0, 0.0, 0.0, 0.0], [-1.0, -1.0, -1.0, -1.0]])
        >>> interval_coverage(lower, lower + 1.5, torch.tensor([-0.5, 0.2, 0.7, 1.2]))
        tensor([0.7500, 0.5000])
    """
    if lower.shape != upper.shape:
        raise ValueError(
            f"upper must have the shape of lower, {list(lower.shape)}, got {list(upper.shape)}"
        )
    targets = real_targets("lower", lower, targets)
    if not (lower <= upper).all():
        raise ValueError("lower must be at most upper, got an interval that ends before it begins")
    is_covered = (lower <= targets) & (targets <= upper)
    return is_covered.to(lower.dtype).flatten(lower.ndim - targets.ndim).mean(-1)


@dataclass(frozen=True, eq=False)
class QuantileCalibration:
    """Share of targets at or below their quantile, at each level, from :func:`quantile_calibration`.

    :param level: levels of the quantiles, shape ``[L]``.
    :param frequency: shares of the targets at or below, shape ``[L]``.
    :param count: number of targets.
    """

    level: torch.Tensor
    frequency: torch.Tensor
    count: int

    @property
    def error(self) -> torch.Tensor:
        """Mean over levels of the gap between frequency and level; of a calibrated model, about ``count ** -0.5``."""
        return (self.frequency - self.level).abs().mean()


def quantile_calibration(
    quantiles: torch.Tensor, levels: Any, targets: torch.Tensor
) -> QuantileCalibration:
    r"""Compute the share of targets at or below their predictive quantile, at each level.

    .. math:: \hat p(p) = \frac{1}{N} \sum_{n=1}^N [y_n \le F_n^{-1}(p)]

    A calibrated model has :math:`\hat p(p) = p`. An overconfident one has too large a share at low levels and too small
    a share at high levels. Counts are at or below their quantile more often than the level says.

    Source: Kuleshov, Fenner and Ermon (2018), *Accurate uncertainties for deep learning using calibrated regression*.

    :param quantiles: predictive quantiles, ``[L, N, *target]``, such as ``Prediction.quantiles(levels)``.
    :param levels: their levels, strictly between zero and one and increasing, ``[L]``.
    :param targets: ``[N, *target]``; ``[N]`` stands for ``[N, 1]``.
    :returns: a result with ``level``, ``frequency``, ``count`` and the mean gap ``error``;
        :func:`~pyro_radial.uncertainty.plots.plot_quantile_calibration` draws it.
    :raises ValueError: if shapes do not fit, a value is NaN, or a level is out of range.

    Example::

        >>> quantiles = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 4)
        >>> quantile_calibration(quantiles, [0.2, 0.5, 0.8], torch.tensor([0.4, 0.6, 0.7, 0.9])).frequency
        tensor([0.0000, 0.2500, 0.7500])
    """
    level = held_numbers("levels", levels)
    if level.ndim != 1 or not ((level > 0) & (level < 1)).all() or not (level.diff() > 0).all():
        raise ValueError(
            f"levels must be increasing numbers strictly between zero and one, got {level.tolist()}"
        )
    if quantiles.ndim < 2 or len(quantiles) != len(level):
        raise ValueError(
            f"quantiles must have shape [{len(level)}, N, ...] to fit levels, got {list(quantiles.shape)}"
        )
    targets = real_targets("quantiles", quantiles, targets, leading=1)
    below = (targets <= quantiles).to(quantiles.dtype)
    return QuantileCalibration(level.to(quantiles), below.flatten(1).mean(-1), targets.numel())


def crps_from_draws(draws: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    r"""Estimate the mean continuous ranked probability score from independent draws, without bias.

    .. math:: \frac{1}{S} \sum_s |x_s - y| - \frac{1}{2 S (S - 1)} \sum_{s \ne t} |x_s - x_t|

    an estimate of :math:`\int (F(z) - [y \le z])^2 dz = E|X - y| - \frac{1}{2} E|X - X'|`. The divisor S - 1 makes the
    score fair: with S instead, fewer draws would score worse. The draws must be independent given the input, such as
    one draw of the target for each function (``Prediction.sample_targets()``). A single estimate may be negative.

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
        raise ValueError(f"draws must have shape [S, N, ...] with S > 1, got {list(draws.shape)}")
    targets = real_targets("draws", draws, targets, leading=1)
    # Relative to the target, so that draws far from zero lose no digits.
    gaps = (draws - targets).sort(0).values
    # In order, the s-th of S is larger than s - 1 others and smaller than S - s.
    weights = 2 * torch.arange(1, number + 1, dtype=gaps.dtype, device=gaps.device) - number - 1
    spread = (weights.reshape(-1, *[1] * (gaps.ndim - 1)) * gaps).sum(0) / (number * (number - 1))
    return (gaps.abs().mean(0) - spread).mean()
