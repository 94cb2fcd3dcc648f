# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL from a factorized normal or a radial distribution to a radial one and its gradient, over given directions."""

import math

import torch
from torch import Tensor

from pyro_radial.distributions.kl_formulas.shared import (
    combine,
    excess_log_square_derivatives,
    log_distance,
    log_distance_derivatives,
    log_of_square,
    project,
    shrinkage,
    terms_for,
)
from pyro_radial.distributions.numerics import MEAN_LOG_HALF_NORMAL, log_sphere_area, row_sum

# Below this the slopes of the controls stay constant in C: at zero they have a pole.
_LEAST_C = 1e-24
# From this C on an expansion in 1 / C is good to 1e-9; pairs of power and coefficient, the highest power first.
_FAR_C = 1000.0
_MOMENTS = [(4, -105.0), (3, 15.0), (2, -3.0), (1, 1.0)]


def normal_to_radial(
    ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool
) -> tuple[Tensor, ...]:
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
    dim = ratio.shape[-1]
    squared = ratio.square()
    shift_squared = shift.square()
    norm = torch.linalg.vector_norm(ratio, dim=-1, keepdim=True)
    along = ratio / norm
    line = ratio * along
    coordinate = noise @ along.unsqueeze(-1)
    across = noise - coordinate * along.unsqueeze(-2)
    point = torch.addcmul(shift.unsqueeze(-2), ratio.unsqueeze(-2), across)
    c = row_sum(point.square()).movedim(-1, 0).contiguous()
    b = project(point, line)
    a = row_sum(line.square()).expand(b.shape)

    mean = row_sum(squared) + row_sum(shift_squared)
    variance = row_sum(squared * (2.0 * squared + 4.0 * shift_squared))
    value, *gradient = _mean_log_distance(
        a, b, c, mean, variance, terms_for(ratio.dtype), with_gradient
    )
    constant = (
        log_sphere_area(dim)
        - 0.5 * dim * (1.0 + math.log(2.0 * math.pi))
        + 0.5 * math.log(0.5 * math.pi)
    )
    closed = constant + 0.5 * mean - row_sum(ratio.log())
    kl = closed + (dim - 1) * (value + MEAN_LOG_HALF_NORMAL)
    if not with_gradient:
        return (kl,)

    by_a, by_b, by_c, by_mean, by_variance = gradient
    of_line, of_mean, of_variance = (
        ((dim - 1) * factor).to(ratio.dtype).unsqueeze(-1)
        for factor in (2.0 * by_a, 2.0 * by_mean + 1.0 / (dim - 1), by_variance)
    )
    of_b, of_c = (
        ((dim - 1) / len(b) * factor).to(ratio.dtype).unsqueeze(-1) for factor in (by_b, 2.0 * by_c)
    )
    by_line = of_line * line + combine(of_b, point)
    by_point = of_b.movedim(0, -2) * line.unsqueeze(-2) + of_c.movedim(0, -2) * point
    by_coordinate = (by_point @ line.unsqueeze(-1)).movedim(-2, 0)
    by_along = by_line * ratio - (
        ratio * combine(coordinate.movedim(-2, 0), by_point) + combine(by_coordinate, noise)
    )
    by_shift = by_point.sum(-2) + (of_mean + 8.0 * of_variance * squared) * shift
    by_ratio = (
        (by_point * across).sum(-2)
        + by_line * along
        + (by_along - along * (along * by_along).sum(-1, keepdim=True)) / norm
        + (of_mean + 8.0 * of_variance * (squared + shift_squared)) * ratio
        - 1.0 / ratio
    )
    return kl, by_ratio, by_shift


def _mean_log_distance(
    a: Tensor, b: Tensor, c: Tensor, mean: Tensor, variance: Tensor, terms: int, with_gradient: bool
) -> tuple[Tensor, ...]:
    """Return the mean of E log rho over the noise across v, with the first two moments of rho^2 as control variates.

    The derivatives in a, b, c, the mean and the variance come after it, if wanted. There is one in b and c for each
    direction, times the number of directions; the line, and so a, is the same for all.
    """
    # Given the noise across v: the mean of rho^2 minus its overall mean, and the mean square of that difference.
    deviation = a + c - mean
    mean_square = 2.0 * a.square() + 4.0 * b.square() + deviation.square()
    relative = variance / mean.square()
    slope = 0.5 / mean
    curve = -0.25 / mean.square() * shrinkage(relative)
    residual = mean_square - variance
    value = (log_distance(a, b, c, terms=terms) - (slope * deviation + curve * residual)).mean(0)
    if not with_gradient:
        return (value,)

    by_a, by_b, by_c = log_distance_derivatives(a, b, c, terms)
    by_deviation = -(slope + 2.0 * curve * deviation)
    by_slope, by_curve = -deviation.mean(0), -residual.mean(0)
    bend = 4.0 * shrinkage(relative) * by_curve * curve
    return (
        value,
        (by_a + by_deviation - 4.0 * curve * a).mean(0),
        by_b - 8.0 * curve * b,
        by_c + by_deviation,
        -by_deviation.mean(0)
        - (by_slope * slope + 2.0 * (by_curve * curve - bend * relative)) / mean,
        curve - bend / mean.square(),
    )


def radial_to_radial(
    ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool
) -> tuple[Tensor, ...]:
    r"""Return the KL; one of its terms is an estimate, unbiased and of low variance. Exact for constant s and d = 0.

    With :math:`s = \sigma / t` and :math:`d = (\mu - m) / t` elementwise, and :math:`\rho = \|s \odot u r + d\|` for
    a uniform direction u and :math:`r \sim N(0, 1)`,

    .. math:: KL = \tfrac12 \Big(\frac{\|s\|^2}D - 1 + \|d\|^2\Big) - \sum_i \log s_i + (D - 1)\, E \log\frac\rho{|r|}.

    Along a direction :math:`\rho^2 = A r^2 + 2 B r + C`, and ``log_distance`` is the exact mean of its logarithm over
    r. The average over directions remains. Each direction stands for the antithetic pair :math:`\pm u`, and control
    variates with known means remove the variation to first order in :math:`A` and :math:`B^2` and to second order in A.
    The noise then falls with the dimension. Arguments and results are those of ``normal_to_radial``.
    """
    dim = ratio.shape[-1]
    squared = ratio.square()
    product = ratio * shift
    mean = row_sum(squared) / dim
    # No result depends on this number near the mean; it keeps digits if the ratios are nearly equal.
    low = mean.to(ratio.dtype).unsqueeze(-1)
    centered = squared - low
    above_low = centered / low
    shifts = row_sum(shift.square())

    squares = noise.square()
    length = row_sum(squares).movedim(-1, 0).contiguous()
    above = (project(squares, centered) / length + (low.squeeze(-1) - mean)) / mean
    # Along each direction rho^2 is A r^2 + 2 B r + C, in units of the mean of A; ``above`` is A - 1 with more digits.
    a = torch.where(above > -0.5, 1.0 + above, project(squares, squared) / (length * mean))
    b = project(noise, product) / (length.sqrt() * mean)
    c = shifts / mean
    # Over all directions, the mean of B^2 and the variance of A.
    square_b = row_sum(product.square()) / (dim * mean.square())
    variance = row_sum(centered.square()) * (2.0 / (dim * (dim + 2))) / mean.square()
    excess, *gradient = _mean_excess(
        a, above, b, c, square_b, variance, terms_for(ratio.dtype), with_gradient
    )

    # With the mean A of the squares, the sum has the logs of s^2 / A and of A, and the excess of the log-distance over
    # log sqrt(A); each comes with the part of the squares that keeps it from being negative.
    spread = row_sum(above_low - log_of_square(ratio / low.sqrt(), above_low))
    level = mean - 1.0
    closed = 0.5 * (spread + (level - log_of_square(mean.sqrt(), level)) + shifts)
    kl = closed + (dim - 1) * excess
    if not with_gradient:
        return (kl,)

    by_a, by_b, by_c, by_square_b, by_variance = gradient
    # A is a sum of squares, B one of products, both over the mean: minus the derivative in the log of that divisor.
    by_divisor = (
        (a * by_a + b * by_b).sum(0)
        + c * by_c
        + 2.0 * (square_b * by_square_b + variance * by_variance)
    )
    by_mean = 0.5 * (1.0 - 1.0 / mean) - (dim - 1) * by_divisor / mean
    of_squares, of_noise, of_centered, of_product, of_mean, of_shift = (
        factor.to(ratio.dtype).unsqueeze(-1)
        for factor in (
            (dim - 1) * by_a / (length * mean),
            (dim - 1) * by_b / (length.sqrt() * mean),
            (dim - 1) * by_variance * (4.0 / (dim * (dim + 2))) / mean.square(),
            (dim - 1) * by_square_b * 2.0 / (dim * mean.square()),
            by_mean / dim,
            1.0 + 2.0 * (dim - 1) * by_c / mean,
        )
    )
    by_squared = combine(of_squares, squares) + (of_centered * centered + of_mean)
    by_product = combine(of_noise, noise) + of_product * product
    by_ratio = above_low / ratio + 2.0 * ratio * by_squared + shift * by_product
    return kl, by_ratio, of_shift * shift + ratio * by_product


def _mean_excess(
    a: Tensor,
    above: Tensor,
    b: Tensor,
    c: Tensor,
    square_b: Tensor,
    variance: Tensor,
    terms: int,
    with_gradient: bool,
) -> tuple[Tensor, ...]:
    """Return the mean of E log rho over the directions, minus its value for A = 1 and B = C = 0 in all directions.

    The derivatives in a, b, c, ``square_b`` and the variance come after it, if wanted; the one in A - 1 counts as one
    in A.
    """
    # The derivatives of the integral in A (to second order) and B^2 (to first), at A = 1 and B = 0. The estimate is
    # unbiased with any values; these make its variance low.
    clamped_c = c.clamp(min=_LEAST_C)
    shrunk = shrinkage(variance)
    slope_a, rise, bend = _slope_in_a(clamped_c, terms)
    curve_a = -0.5 * (slope_a + rise) * shrunk
    slope_b = 2.0 * rise / clamped_c
    residual_a = above.square() - variance
    residual_b = b.square() - square_b
    c_of_each = c.expand(a.shape)
    log_distances = log_distance(a, b, c_of_each, above, terms)
    mean = (log_distances - (slope_a * above + curve_a * residual_a + slope_b * residual_b)).mean(0)
    if not with_gradient:
        return (mean,)

    by_a, by_b, by_c = log_distance_derivatives(a, b, c_of_each, terms)
    by_slope_a = -above.mean(0)
    by_curve_a = -residual_a.mean(0)
    by_slope_b = -residual_b.mean(0)
    # The control variates depend on C too.
    by_clamped_c = (by_slope_a * rise - 0.5 * by_curve_a * shrunk * (rise + bend)) / clamped_c
    by_clamped_c = by_clamped_c + 2.0 * by_slope_b * (bend - rise) / clamped_c.square()
    return (
        mean,
        (by_a - slope_a - 2.0 * curve_a * above) / a.shape[0],
        (by_b - 2.0 * slope_b * b) / a.shape[0],
        by_c.mean(0) + torch.where(c > _LEAST_C, by_clamped_c, 0.0),
        slope_b,
        curve_a * (1.0 - 4.0 * shrunk * by_curve_a),
    )


def _slope_in_a(c: Tensor, terms: int) -> list[Tensor]:
    r"""Return the derivative of the log-distance in A, and its first and second derivatives in the log of C.

    At A = 1 and B = 0 it is :math:`\tfrac12 E[r^2 / (r^2 + C)]`.
    """
    width = c.sqrt()
    _, by_width = excess_log_square_derivatives(torch.zeros_like(width), width, terms)
    # E[C / (r^2 + C)] and one minus it; by the equation of the Faddeeva function one more derivative is a polynomial in
    # these.
    c_fraction = 0.5 * width * by_width
    square_fraction = 1.0 - c_fraction
    first_derivative = 0.5 * (c_fraction - c * square_fraction)
    second_derivative = 0.5 * ((1.0 + c) * first_derivative - c * square_fraction)
    # Where the differences cancel, the moments of r^2 in powers of 1 / C.
    inverse, asymptotic = 1.0 / c.clamp(min=_FAR_C), [torch.zeros_like(c)] * 3
    for power, moment in _MOMENTS:
        asymptotic = [
            inverse * (value + moment * (-power) ** order) for order, value in enumerate(asymptotic)
        ]
    exact = square_fraction, -first_derivative, -second_derivative
    return [0.5 * torch.where(c > _FAR_C, *pair) for pair in zip(asymptotic, exact, strict=True)]
