# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL from a factorized normal to a radial distribution and its gradient, averaged over given directions."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_radial.distributions.kl_formulas.shared import (
    combine,
    log_distance,
    project,
    shrinkage,
    slopes_of_log_distance,
    terms_for,
)
from pyro_radial.distributions.special import MEAN_LOG_HALF_NORMAL, log_sphere_area, row_sum

__all__ = ["normal_to_radial"]


def normal_to_radial(ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool) -> tuple[Tensor, ...]:
    r"""Return the KL; one of its terms is an estimate, unbiased and of low variance.

    With :math:`s = \sigma / t` and :math:`d = (\mu - m) / t` elementwise, :math:`\rho = \|s \odot \epsilon + d\|` for
    standard normal :math:`\epsilon`, and the log-area S of the unit sphere,

    .. math:: KL = S - \tfrac D2 \log 2\pi e + \tfrac12 \log\tfrac\pi2 + \tfrac12 (\|s\|^2 + \|d\|^2) - \sum_i \log s_i
        + (D - 1)\, E \log \rho.

    Along any fixed unit vector v the noise is :math:`r v + \epsilon_\perp`. Given :math:`\epsilon_\perp` the distance
    is that to a line through :math:`s \odot \epsilon_\perp + d`, and ``log_distance`` is the exact mean over r. Here v
    points along s, where the noise is largest. The control variates are the first two moments of :math:`\rho^2`.
    Ratio and shift, s and d, are ``[*batch, D]`` with D at least 2; the noise is ``[*batch, directions, D]``. The
    derivatives in s and d come after the KL, if wanted.
    """
    dim, terms = ratio.shape[-1], terms_for(ratio.dtype)
    squared, shift_squared = ratio.square(), shift.square()
    norm = torch.linalg.vector_norm(ratio, dim=-1, keepdim=True)
    along = ratio / norm
    line = ratio * along
    part = noise @ along.unsqueeze(-1)
    across = noise - part * along.unsqueeze(-2)
    point = torch.addcmul(shift.unsqueeze(-2), ratio.unsqueeze(-2), across)
    c = row_sum(point.square()).movedim(-1, 0).contiguous()
    b = project(point, line)
    a = row_sum(line.square()).expand(b.shape)

    mean = row_sum(squared) + row_sum(shift_squared)
    variance = row_sum(squared * (2.0 * squared + 4.0 * shift_squared))
    value, gradient = _mean_log_distance(a, b, c, mean, variance, terms, with_gradient)
    constant = log_sphere_area(dim) - 0.5 * dim * (1.0 + math.log(2.0 * math.pi)) + 0.5 * math.log(0.5 * math.pi)
    closed = constant + 0.5 * mean - row_sum(ratio.log())
    kl = closed + (dim - 1) * (value + MEAN_LOG_HALF_NORMAL)
    if gradient is None:
        return (kl,)

    of_line, of_mean, of_variance = (
        ((dim - 1) * factor).to(ratio.dtype).unsqueeze(-1)
        for factor in (2.0 * gradient.a, 2.0 * gradient.mean + 1.0 / (dim - 1), gradient.variance)
    )
    of_b, of_c = (
        ((dim - 1) / len(b) * factor).to(ratio.dtype).unsqueeze(-1) for factor in (gradient.b, 2.0 * gradient.c)
    )
    by_line = of_line * line + combine(of_b, point)
    by_point = of_b.movedim(0, -2) * line.unsqueeze(-2) + of_c.movedim(0, -2) * point
    by_part = (by_point @ line.unsqueeze(-1)).movedim(-2, 0)
    by_along = by_line * ratio - (ratio * combine(part.movedim(-2, 0), by_point) + combine(by_part, noise))
    by_shift = by_point.sum(-2) + (of_mean + 8.0 * of_variance * squared) * shift
    by_ratio = (
        (by_point * across).sum(-2)
        + by_line * along
        + (by_along - along * (along * by_along).sum(-1, keepdim=True)) / norm
        + (of_mean + 8.0 * of_variance * (squared + shift_squared)) * ratio
        - 1.0 / ratio
    )
    return kl, by_ratio, by_shift


class _Gradient(NamedTuple):
    """The derivatives in the numbers of a line and in the mean and the variance of rho^2."""

    a: Tensor  # [*batch], the same line for all directions
    b: Tensor  # [directions, *batch], times their number
    c: Tensor
    mean: Tensor
    variance: Tensor


def _mean_log_distance(
    a: Tensor, b: Tensor, c: Tensor, mean: Tensor, variance: Tensor, terms: int, with_gradient: bool
) -> tuple[Tensor, _Gradient | None]:
    """The mean of E log rho over the noise across v, with the first two moments of rho^2 as control variates."""
    # Given the noise across v: the mean of rho^2 minus its overall mean, and the mean square of that difference.
    first = a + c - mean
    second = 2.0 * a.square() + 4.0 * b.square() + first.square()
    relative = variance / mean.square()
    slope, curve = 0.5 / mean, -0.25 / mean.square() * shrinkage(relative)
    residual = second - variance
    value = (log_distance(a, b, c, terms=terms) - (slope * first + curve * residual)).mean(0)
    if not with_gradient:
        return value, None

    by_a, by_b, by_c = slopes_of_log_distance(a, b, c, terms)
    by_first = -(slope + 2.0 * curve * first)
    by_slope, by_curve = -first.mean(0), -residual.mean(0)
    bend = 4.0 * shrinkage(relative) * by_curve * curve
    return value, _Gradient(
        (by_a + by_first - 4.0 * curve * a).mean(0),
        by_b - 8.0 * curve * b,
        by_c + by_first,
        -by_first.mean(0) - (by_slope * slope + 2.0 * (by_curve * curve - bend * relative)) / mean,
        curve - bend / mean.square(),
    )
