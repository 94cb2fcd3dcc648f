# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mean log-distance from a radial distribution's center: the one term of its KL without a closed form."""

import math
from typing import NamedTuple

import torch
from pyro import settings
from torch import Tensor

from pyro_radial._checks import positive_count
from pyro_radial.distributions.fixed_noise import fixed_noise
from pyro_radial.distributions.mean_log_square import MEAN_LOG_CHI_SQUARED, excess_log_square
from pyro_radial.distributions.special import MEAN_LOG_HALF_NORMAL, accumulation_dtype, row_sum

__all__ = [
    "Squares",
    "excess_log_distance_of_radial",
    "log_of_square",
    "mean_log_distance_of_normal",
    "mean_log_distance_of_radial",
    "num_directions",
]

# Directions, and how many numbers to draw at least: a small event is noisier, and cheap; in a batch of them the noise
# averages out. By benchmarks/distributions/radial_kl.py it is then below 1 % of max(KL, 100 nats) in every case
# measured there.
NUM_DIRECTIONS = 2
_LEAST_DRAWS = 1000
# Fixed, so that a KL is a function of its parameters; None draws fresh directions from torch's global generator.
DIRECTION_SEED: int | None = 0
# Added to the seed: a user's own seed is often 0 too, and means drawn with it would lie along the directions.
_STREAM = 0x5851F42D


@settings.register("radial_kl_directions", __name__, "NUM_DIRECTIONS")
def _check_directions(value: int) -> None:
    positive_count("radial_kl_directions", value)


@settings.register("radial_kl_seed", __name__, "DIRECTION_SEED")
def _check_seed(value: int | None) -> None:
    if isinstance(value, bool) or not (value is None or isinstance(value, int)):
        raise ValueError(f"radial_kl_seed must be an integer, or None for fresh directions, got {value!r}")


class Squares(NamedTuple):
    """The squared ratios of each event about a constant near their mean, and the sum of its squared shifts."""

    squared: Tensor  # s^2, [*batch, D]
    centered: Tensor  # s^2 less the constant
    low: Tensor  # the constant, [*batch, 1], which no result depends on
    mean: Tensor  # of s^2, [*batch, 1], in the accumulation dtype
    shifts: Tensor  # the sum of d^2, [*batch, 1], in the accumulation dtype

    @classmethod
    def of(cls, ratio: Tensor, shift: Tensor) -> "Squares":
        """Of the arguments of the mean log-distance."""
        squared = ratio.square()
        mean = row_sum(squared).unsqueeze(-1) / ratio.shape[-1]
        low = mean.detach().to(squared.dtype)
        return cls(squared, squared - low, low, mean, row_sum(shift.square()).unsqueeze(-1))


def mean_log_distance_of_radial(ratio: Tensor, shift: Tensor) -> Tensor:
    r"""E log rho for the unit noise of a radial distribution, an unbiased, low-variance estimate; exact for constant s
    and d = 0.

    With :math:`s = \sigma / t` and :math:`d = (\mu - m) / t` elementwise, :math:`\rho = \|s \odot \epsilon + d\|` where
    :math:`\epsilon` is the unit noise of the other distribution. Along a unit direction u, with signed
    :math:`r \sim N(0, 1)`, :math:`\rho^2 = A r^2 + 2 B r + C`, whose mean logarithm over r is exact
    (:func:`~pyro_radial.distributions.mean_log_square.mean_log_square`). What is left is an average over directions.
    Each stands for the antithetic pair :math:`\pm u`, and control variates whose means are known take away what varies
    with it to first order in :math:`A` and :math:`B^2` and to second in A. That makes the noise fall with the
    dimension; ``benchmarks/distributions/radial_kl.py`` measures it.

    :param Tensor ratio: s, positive, ``[*batch, D]``.
    :param Tensor shift: d, ``[*batch, D]``.
    :returns: ``[*batch]``, in the accumulation dtype.
    """
    squares = Squares.of(ratio, shift)
    excess = excess_log_distance_of_radial(ratio, shift, squares)
    return excess + (0.5 * squares.mean.squeeze(-1).log() + MEAN_LOG_HALF_NORMAL)


def excess_log_distance_of_radial(ratio: Tensor, shift: Tensor, given: Squares) -> Tensor:
    """By how much :func:`mean_log_distance_of_radial` exceeds that of constant ratios, their root mean square, at equal
    means: zero to the last digit where that is what they are.

    :param Tensor ratio: s, positive, ``[*batch, D]``.
    :param Tensor shift: d, ``[*batch, D]``.
    :param Squares given: of these.
    :returns: ``[*batch]``, in the accumulation dtype.
    """
    dim, sums = ratio.shape[-1], accumulation_dtype(ratio)
    squared, centered, low, mean, shifts = given
    product = ratio * shift

    noise = _noise(ratio)
    squares = noise.square()
    length = squares.sum(-1).to(sums)
    a = _project(squares, squared).to(sums) / (length * mean)
    above = (_project(squares, centered).to(sums) / length + (low - mean)) / mean
    b = _project(noise, product).to(sums) / (length.sqrt() * mean)
    c = shifts / mean
    # In units of the mean of A: the mean of B^2, and the variance of A.
    square_b = row_sum(product.square()).unsqueeze(-1) / (dim * mean.square())
    variance = row_sum(centered.square()).unsqueeze(-1) * (2.0 / (dim * (dim + 2))) / mean.square()

    # How the integral depends on A (to second order) and B^2 (to first), by differences over their spread. Any values
    # leave the estimate unbiased; these make its variance low.
    step = _sqrt(variance).clamp(1e-4, 0.5)
    reference = square_b.clamp(min=1e-8)
    # Never near the cone's tip, where a difference would bend with the last digit of its parts.
    root, one, near = reference.sqrt(), torch.ones_like(reference), torch.maximum(c, 2.0 * reference)
    value = _half_excess(
        torch.cat([a, one, one + step, one - step, one], -1),
        torch.cat([above, torch.zeros_like(step), step, -step, torch.zeros_like(step)], -1),
        torch.cat([b, root, root, root, torch.zeros_like(root)], -1),
        torch.cat([c.expand(a.shape), near, near, near, near], -1),
    )
    value, (here, more, less, straight) = value[..., :-4], value[..., -4:].unsqueeze(-2).unbind(-1)
    slope_a = (more - less) / (2.0 * step)
    curve_a = 0.5 * (more - 2.0 * here + less) / step.square() * _shrinkage(variance)
    slope_b = (here - straight) / reference
    controls = slope_a * above + curve_a * (above.square() - variance) + slope_b * (b.square() - square_b)
    return (value - controls).mean(-1)


def mean_log_distance_of_normal(ratio: Tensor, shift: Tensor) -> Tensor:
    r"""E log rho for standard normal noise, an unbiased, low-variance estimate.

    Along any fixed unit v the noise is :math:`r v + \epsilon_\perp`, so the same integral over r applies with
    :math:`s \odot \epsilon_\perp + d` in the place of d. Here v points along s, where the noise is largest.

    :param Tensor ratio: s, positive, ``[*batch, D]``.
    :param Tensor shift: d, ``[*batch, D]``.
    :returns: ``[*batch]``, in the accumulation dtype.
    """
    sums = accumulation_dtype(ratio)
    along = torch.nn.functional.normalize(ratio, dim=-1)
    noise = _noise(ratio)
    noise = noise - _project(noise, along).unsqueeze(-1) * along.unsqueeze(-2)
    shifted = shift.unsqueeze(-2) + ratio.unsqueeze(-2) * noise
    a = (ratio * along).square().sum(-1, keepdim=True, dtype=sums)
    b = _project(shifted, ratio * along).to(sums)
    c = shifted.square().sum(-1, dtype=sums)

    squared = ratio.square()
    mean = squared.sum(-1, keepdim=True, dtype=sums) + shift.square().sum(-1, keepdim=True, dtype=sums)
    variance = (squared * (2.0 * squared + 4.0 * shift.square())).sum(-1, keepdim=True, dtype=sums)
    # Given the noise across v: the mean of rho^2 less its overall mean, and the mean square of that difference.
    first = a + c - mean
    second = 2.0 * a.square() + 4.0 * b.square() + first.square()
    slope = 0.5 / mean
    curve = -0.25 / mean.square() * _shrinkage(variance / mean.square())
    value = 0.5 * (a.log() + MEAN_LOG_CHI_SQUARED + _excess(a, b, c))
    return (value - slope * first - curve * (second - variance)).mean(-1)


def _half_excess(a: Tensor, above: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """E log sqrt(a r^2 + 2 b r + c) for r ~ N(0, 1), with a = 1 + above, less its value at a = 1, b = c = 0."""
    return 0.5 * (log_of_square(a.sqrt(), above) + _excess(a, b, c))


def _excess(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    offset = b / a
    return excess_log_square(offset, _sqrt(c / a - offset.square()))


def log_of_square(root: Tensor, above: Tensor) -> Tensor:
    """The log of a square, from its root and from what it has above one, which keeps its digits near one."""
    return above.clamp(min=-0.5).log1p() + 2.0 * (root * math.sqrt(2.0)).clamp(max=1.0).log()


def _sqrt(square: Tensor) -> Tensor:
    """The root of a square that rounding may have left below zero, with gradient zero there: the tip of the cone."""
    return square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


def _shrinkage(relative_variance: Tensor) -> Tensor:
    """Where a square varies much, a parabola overstates the bend of its log; the 4 is near the best of those tried."""
    return 1.0 / (1.0 + 4.0 * relative_variance)


def num_directions(num_elements: int) -> int:
    """How many directions a mean is taken over, for a batch of events with so many elements in all."""
    return max(NUM_DIRECTIONS, math.ceil(_LEAST_DRAWS / max(num_elements, 1)))


def _noise(like: Tensor) -> Tensor:
    """Standard normal noise for each direction, ``[*batch, directions, D]``."""
    shape = (*like.shape[:-1], num_directions(like.numel()), like.shape[-1])
    if DIRECTION_SEED is None:
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    return fixed_noise(shape, (DIRECTION_SEED + _STREAM) % 2**63, like)


def _project(directions: Tensor, vector: Tensor) -> Tensor:
    """The inner product with each direction, ``[*batch, directions]``."""
    return (directions @ vector.unsqueeze(-1)).squeeze(-1)
