# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL between radial distributions and its gradient, averaged over given directions."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_radial.distributions.kl_formulas.shared import (
    combine,
    log_distance,
    log_of_square,
    project,
    shrinkage,
    slopes_of_log_distance,
    slopes_of_log_square,
    terms_for,
)
from pyro_radial.distributions.special import row_sum

__all__ = ["radial_to_radial"]

# Below this the slopes of the controls stay constant in C: at zero they have a pole.
_LEAST_C = 1e-24
# From this C on an expansion in 1 / C is good to 1e-9; pairs of power and coefficient, the highest power first.
_FAR = 1000.0
_MOMENTS = [(4, -105.0), (3, 15.0), (2, -3.0), (1, 1.0)]


def radial_to_radial(ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool) -> tuple[Tensor, ...]:
    r"""Return the KL; one of its terms is an estimate, unbiased and of low variance. Exact for constant s and d = 0.

    With :math:`s = \sigma / t` and :math:`d = (\mu - m) / t` elementwise, and :math:`\rho = \|s \odot u r + d\|` for
    a uniform direction u and :math:`r \sim N(0, 1)`,

    .. math:: KL = \tfrac12 \Big(\frac{\|s\|^2}D - 1 + \|d\|^2\Big) - \sum_i \log s_i + (D - 1)\, E \log\frac\rho{|r|}.

    Along a direction :math:`\rho^2 = A r^2 + 2 B r + C`, and ``log_distance`` is the exact mean of its logarithm over
    r. The average over directions remains. Each direction stands for the antithetic pair :math:`\pm u`, and control
    variates with known means remove the variation to first order in :math:`A` and :math:`B^2` and to second order in A.
    The noise then falls with the dimension; ``benchmarks/distributions/radial_kl.py`` measures it. Arguments and
    results are those of ``normal_to_radial``.
    """
    dim = ratio.shape[-1]
    squared, product = ratio.square(), ratio * shift
    mean = row_sum(squared) / dim
    # No result depends on this number near the mean; it keeps digits if the ratios are nearly equal.
    low = mean.to(ratio.dtype).unsqueeze(-1)
    centered = squared - low
    above_low = centered / low
    shifts = row_sum(shift.square())

    squares = noise.square()
    length = row_sum(squares).movedim(-1, 0).contiguous()
    above = (project(squares, centered) / length + (low.squeeze(-1) - mean)) / mean
    # In units of the mean of A: along each direction, and the mean of B^2 and the variance of A.
    line = _Line(
        torch.where(above > -0.5, 1.0 + above, project(squares, squared) / (length * mean)),
        above,
        project(noise, product) / (length.sqrt() * mean),
        shifts / mean,
        row_sum(product.square()) / (dim * mean.square()),
        row_sum(centered.square()) * (2.0 / (dim * (dim + 2))) / mean.square(),
    )
    excess, gradient = _mean_excess(line, terms_for(ratio.dtype), with_gradient)

    # With the mean A of the squares, the sum has the logs of s^2 / A and of A, and the excess of the log-distance over
    # log sqrt(A); each comes with the part of the squares that keeps it from being negative.
    spread = row_sum(above_low - log_of_square(ratio / low.sqrt(), above_low))
    level = mean - 1.0
    closed = 0.5 * (spread + (level - log_of_square(mean.sqrt(), level)) + shifts)
    kl = closed + (dim - 1) * excess
    if gradient is None:
        return (kl,)

    # A is a sum of squares, B one of products, both over the mean.
    by_mean = 0.5 * (1.0 - 1.0 / mean) - (dim - 1) * gradient.along(line) / mean
    of_squares, of_noise, of_centered, of_product, of_mean, of_shift = (
        factor.to(ratio.dtype).unsqueeze(-1)
        for factor in (
            (dim - 1) * gradient.a / (length * mean),
            (dim - 1) * gradient.b / (length.sqrt() * mean),
            (dim - 1) * gradient.variance * (4.0 / (dim * (dim + 2))) / mean.square(),
            (dim - 1) * gradient.square_b * 2.0 / (dim * mean.square()),
            by_mean / dim,
            1.0 + 2.0 * (dim - 1) * gradient.c / mean,
        )
    )
    by_squared = combine(of_squares, squares) + (of_centered * centered + of_mean)
    by_product = combine(of_noise, noise) + of_product * product
    by_ratio = above_low / ratio + 2.0 * ratio * by_squared + shift * by_product
    return kl, by_ratio, of_shift * shift + ratio * by_product


class _Line(NamedTuple):
    """The squared distance along each direction, :math:`A r^2 + 2 B r + C`, and its variation over directions."""

    a: Tensor  # [directions, *batch]
    above: Tensor  # A - 1, with all its digits
    b: Tensor
    c: Tensor  # [*batch], like the rest
    square_b: Tensor  # the mean of B^2 over all directions
    variance: Tensor  # of A


class _Gradient(NamedTuple):
    """The derivatives in the numbers of a line; the derivative in A - 1 counts as one in A."""

    a: Tensor
    b: Tensor
    c: Tensor
    square_b: Tensor
    variance: Tensor

    def along(self, line: _Line) -> Tensor:
        """Minus the derivative in the log of the common divisor of A, B and C."""
        own = (line.a * self.a + line.b * self.b).sum(0)
        return own + line.c * self.c + 2.0 * (line.square_b * self.square_b + line.variance * self.variance)


def _mean_excess(line: _Line, terms: int, with_gradient: bool) -> tuple[Tensor, _Gradient | None]:
    """The mean of E log rho over the directions, minus its value for A = 1 and B = C = 0 in all directions."""
    a, above, b, c, square_b, variance = line
    # The derivatives of the integral in A (to second order) and B^2 (to first), at A = 1 and B = 0. The estimate is
    # unbiased with any values; these make its variance low.
    near, shrunk = c.clamp(min=_LEAST_C), shrinkage(variance)
    slope_a, rise, bend = _slope_in_a(near, terms)
    curve_a, slope_b = -0.5 * (slope_a + rise) * shrunk, 2.0 * rise / near
    residual_a, residual_b = above.square() - variance, b.square() - square_b
    c_of_each = c.expand(a.shape)
    own = log_distance(a, b, c_of_each, above, terms)
    mean = (own - (slope_a * above + curve_a * residual_a + slope_b * residual_b)).mean(0)
    if not with_gradient:
        return mean, None

    by_a, by_b, by_c = slopes_of_log_distance(a, b, c_of_each, terms)
    by_slope_a, by_curve_a, by_slope_b = (-t.mean(0) for t in (above, residual_a, residual_b))
    # The control variates depend on C too.
    by_near = (by_slope_a * rise - 0.5 * by_curve_a * shrunk * (rise + bend)) / near
    by_near = by_near + 2.0 * by_slope_b * (bend - rise) / near.square()
    return mean, _Gradient(
        (by_a - slope_a - 2.0 * curve_a * above) / a.shape[0],
        (by_b - 2.0 * slope_b * b) / a.shape[0],
        by_c.mean(0) + torch.where(c > _LEAST_C, by_near, 0.0),
        slope_b,
        curve_a * (1.0 - 4.0 * shrunk * by_curve_a),
    )


def _slope_in_a(c: Tensor, terms: int) -> list[Tensor]:
    r"""The derivative of the log-distance in A at A = 1 and B = 0, :math:`\tfrac12 E[r^2 / (r^2 + C)]`, and its first
    and second derivatives in the log of C.
    """
    width = c.sqrt()
    _, by_width = slopes_of_log_square(torch.zeros_like(width), width, terms)
    # E[C / (r^2 + C)] and one minus it; by the equation of the Faddeeva function one more derivative is a polynomial in
    # these.
    part = 0.5 * width * by_width
    rest = 1.0 - part
    first = 0.5 * (part - c * rest)
    second = 0.5 * ((1.0 + c) * first - c * rest)
    # Where the differences cancel, the moments of r^2 in powers of 1 / C.
    inverse, far = 1.0 / c.clamp(min=_FAR), [torch.zeros_like(c)] * 3
    for power, moment in _MOMENTS:
        far = [inverse * (value + moment * (-power) ** order) for order, value in enumerate(far)]
    near = rest, -first, -second
    return [0.5 * torch.where(c > _FAR, *pair) for pair in zip(far, near, strict=True)]
