# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Do predictive intervals and quantiles of real targets hold what they promise."""

from dataclasses import dataclass
from typing import Any

import torch

from pyro_radial.uncertainty._inputs import real_targets

__all__ = ["QuantileCalibration", "interval_coverage", "quantile_calibration"]


def interval_coverage(lower: torch.Tensor, upper: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    r"""Share of the targets within their predictive intervals, the ends included.

    .. math:: \frac{1}{N} \sum_{n=1}^N [l_n \le y_n \le u_n]

    For intervals from the quantile at (1 - c) / 2 to that at (1 + c) / 2 it should be c. Wide intervals cover
    everything: give their mean width beside it.

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
            f"interval_coverage: upper must have the shape of lower, {list(lower.shape)}, got {list(upper.shape)}"
        )
    targets = real_targets("interval_coverage", "lower", lower, targets)
    if not (lower <= upper).all():
        raise ValueError("interval_coverage: lower must be at most upper, got an interval that ends before it begins")
    inside = (lower <= targets) & (targets <= upper)
    return inside.to(lower.dtype).flatten(lower.ndim - targets.ndim).mean(-1)


@dataclass(frozen=True, eq=False)
class QuantileCalibration:
    """Share of targets at or below their quantile, at each level; made by :func:`quantile_calibration`.

    :param level: levels of the quantiles, shape ``[L]``.
    :param share: shares of the targets at or below, shape ``[L]``.
    :param count: number of targets.
    """

    level: torch.Tensor
    share: torch.Tensor
    count: int

    @property
    def error(self) -> torch.Tensor:
        """Mean over levels of the gap between share and level.

        On finitely many targets a calibrated model has a value above zero, of the order of ``count ** -0.5``.

        :returns: 0-d tensor in ``[0, 1]``.
        """
        return (self.share - self.level).abs().mean()


def quantile_calibration(quantiles: torch.Tensor, levels: Any, targets: torch.Tensor) -> QuantileCalibration:
    r"""Share of the targets at or below their predictive quantile, against the level of the quantile.

    .. math:: \hat p(p) = \frac{1}{N} \sum_{n=1}^N [y_n \le F_n^{-1}(p)]

    A calibrated model has :math:`\hat p(p) = p`. One that is too sure has too large a share at low levels and too small
    a one at high levels. Counts are at or below their quantile more often than the level says.

    Source: Kuleshov, Fenner and Ermon (2018), *Accurate uncertainties for deep learning using calibrated regression*.

    :param quantiles: predictive quantiles, ``[L, N, *target]``, such as ``Prediction.quantiles(levels)``.
    :param levels: their levels, strictly between zero and one and increasing, ``[L]``.
    :param targets: ``[N, *target]``; ``[N]`` stands for ``[N, 1]``.
    :returns: the share at each level, and its mean error.
    :raises ValueError: if shapes do not fit, a value is NaN, or a level is out of range.

    Example::

        >>> quantiles = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, 4)
        >>> quantile_calibration(quantiles, [0.2, 0.5, 0.8], torch.tensor([0.4, 0.6, 0.7, 0.9])).share
        tensor([0.0000, 0.2500, 0.7500])
    """
    level = torch.as_tensor(levels, dtype=quantiles.dtype, device=quantiles.device)
    if level.ndim != 1 or not ((level > 0) & (level < 1)).all() or not (level.diff() > 0).all():
        raise ValueError(
            f"quantile_calibration: levels must be increasing numbers strictly between zero and one, got "
            f"{level.tolist()}"
        )
    if quantiles.ndim < 2 or len(quantiles) != len(level):
        raise ValueError(
            f"quantile_calibration: quantiles must have shape [{len(level)}, N, ...] to fit levels, got "
            f"{list(quantiles.shape)}"
        )
    targets = real_targets("quantile_calibration", "quantiles", quantiles, targets, leading=1)
    below = (targets <= quantiles).to(quantiles.dtype)
    return QuantileCalibration(level, below.flatten(1).mean(-1), targets.numel())
