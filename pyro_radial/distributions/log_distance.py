# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mean log-distance from a radial distribution's center: the one term of its KL without a closed form."""

import math

import numpy as np
import torch
from pyro import settings
from torch import Tensor

from pyro_radial._checks import positive_count
from pyro_radial.distributions.special import accumulation_dtype

__all__ = ["mean_log_distance_of_normal", "mean_log_distance_of_radial", "mean_log_square", "num_directions"]

# Directions, and how many numbers to draw at least: a small event is noisier, and cheap; in a batch of them the noise
# averages out. By benchmarks/distributions/radial_kl.py it is then below 1 % of max(KL, 100 nats) in every case
# measured there.
NUM_DIRECTIONS = 2
_LEAST_DRAWS = 1000
# Fixed, so that a KL is a function of its parameters; None draws fresh directions from torch's global generator.
DIRECTION_SEED: int | None = 0
# Added to the seed: a user's own seed is often 0 too, and means drawn with it would lie along the directions.
_STREAM = 0x5851F42D

# Terms of the expansion of mean_log_square: its error is below 1e-13, that of 24 terms up to 5e-11.
_NUM_TERMS = 32


@settings.register("radial_kl_directions", __name__, "NUM_DIRECTIONS")
def _check_directions(value: int) -> None:
    positive_count("radial_kl_directions", value)


@settings.register("radial_kl_seed", __name__, "DIRECTION_SEED")
def _check_seed(value: int | None) -> None:
    if isinstance(value, bool) or not (value is None or isinstance(value, int)):
        raise ValueError(f"radial_kl_seed must be an integer, or None for fresh directions, got {value!r}")


def _expansion(terms: int) -> tuple[float, np.ndarray]:
    """Weideman's map parameter L and the coefficients of his expansion of the Faddeeva function."""
    width = math.sqrt(terms / math.sqrt(2.0))
    angles = np.arange(-2 * terms + 1, 2 * terms) * (math.pi / (2 * terms))
    points = width * np.tan(0.5 * angles)
    samples = np.concatenate([[0.0], np.exp(-(points**2)) * (width**2 + points**2)])
    return width, np.fft.fft(np.fft.fftshift(samples)).real[1 : terms + 1] / (4 * terms)


_WIDTH, _COEFFICIENTS = _expansion(_NUM_TERMS)
_POWERS = -2.0 * math.sqrt(math.pi) / _WIDTH * _COEFFICIENTS / np.arange(1, _NUM_TERMS + 1)
# So that the value tends to log(b^2 + c^2) far away, where Z tends to -1.
_CONSTANT = math.log(2.0) - float(np.sum(_POWERS * (-1.0) ** np.arange(1, _NUM_TERMS + 1)))


def mean_log_square(offset: Tensor, width: Tensor) -> Tensor:
    r"""E log((r + b)^2 + c^2) for r ~ N(0, 1), to 1e-13 in float64, without a branch or a singularity.

    It is :math:`2\,\mathrm{Re}\,E \log(z + r)` at z = b + ic, whose derivative in z is
    :math:`-i\sqrt{\pi/2}\, w(z / \sqrt2)` with the Faddeeva function w. Weideman (1994), "Computation of the complex
    error function", SIAM J. Numer. Anal. 31, expands w in powers of :math:`Z = (L + i\zeta) / (L - i\zeta)` with
    :math:`\zeta = z / \sqrt2`, which integrates in closed form. Unlike Gauss-Hermite quadrature it holds at b = c = 0,
    where the logarithm is singular.

    :param Tensor offset: b, any real numbers.
    :param Tensor width: c, at least zero; broadcasts with b.

    >>> zero = torch.zeros((), dtype=torch.double)
    >>> bool(torch.isclose(mean_log_square(zero, zero), torch.tensor(-0.5772156649015329 - math.log(2.0)).double()))
    True
    """
    x, y = torch.broadcast_tensors(offset / math.sqrt(2.0), width / math.sqrt(2.0))
    powers = (torch.complex(_WIDTH - y, x) / torch.complex(_WIDTH + y, -x)).unsqueeze(-1)
    while powers.shape[-1] < _NUM_TERMS:
        powers = torch.cat([powers, powers * powers[..., -1:]], -1)
    coefficients = torch.tensor(_POWERS, dtype=x.dtype, device=x.device)
    return _CONSTANT + ((_WIDTH + y).square() + x.square()).log() + powers[..., :_NUM_TERMS].real @ coefficients


def mean_log_distance_of_radial(ratio: Tensor, shift: Tensor) -> Tensor:
    r"""E log rho for the unit noise of a radial distribution, an unbiased, low-variance estimate; exact for constant s
    and d = 0.

    With :math:`s = \sigma / t` and :math:`d = (\mu - m) / t` elementwise, :math:`\rho = \|s \odot \epsilon + d\|` where
    :math:`\epsilon` is the unit noise of the other distribution. Along a unit direction u, with signed
    :math:`r \sim N(0, 1)`, :math:`\rho^2 = A r^2 + 2 B r + C`, whose mean logarithm over r is exact
    (:func:`mean_log_square`). What is left is an average over directions. Each stands for the antithetic pair
    :math:`\pm u`, and control variates whose means are known take away what varies with it to first order in :math:`A`
        and
    :math:`B^2` and to second in A. That makes the noise fall with the dimension;
        ``benchmarks/distributions/radial_kl.py`` measures it.

    :param Tensor ratio: s, positive, ``[*batch, D]``.
    :param Tensor shift: d, ``[*batch, D]``.
    :returns: ``[*batch]``, in the accumulation dtype.
    """
    dim, sums = ratio.shape[-1], accumulation_dtype(ratio)
    squared = ratio.square()
    direction = _noise(ratio)
    direction = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    mean_a = squared.mean(-1, keepdim=True, dtype=sums)
    a = _project(direction.square(), squared).to(sums)
    b = _project(direction, ratio * shift).to(sums)
    c = shift.square().sum(-1, keepdim=True, dtype=sums)
    centered = squared - mean_a.to(squared.dtype)
    variance_a = centered.square().sum(-1, keepdim=True, dtype=sums) * (2.0 / (dim * (dim + 2)))
    mean_b_squared = (ratio * shift).square().sum(-1, keepdim=True, dtype=sums) / dim

    slope_a, curve_a, slope_b = _local_shape(mean_a, variance_a, mean_b_squared, c)
    controls = slope_a * (a - mean_a) + curve_a * ((a - mean_a).square() - variance_a)
    controls = controls + slope_b * (b.square() - mean_b_squared)
    return (_half_mean_log(a, b, c) - controls).mean(-1)


def mean_log_distance_of_normal(ratio: Tensor, shift: Tensor) -> Tensor:
    r"""E log rho for standard normal noise, an unbiased, low-variance estimate.

    Along any fixed unit v the noise is :math:`r v + \epsilon_\perp`, so the same integral over r applies with
    :math:`s \odot \epsilon_\perp + d` in the place of d. Here v points along s, where the noise is largest.

    :param Tensor ratio: s, positive, ``[*batch, D]``.
    :param Tensor shift: d, ``[*batch, D]``.
    :returns: ``[*batch]``, in the accumulation dtype.
    """
    sums = accumulation_dtype(ratio)
    along = torch.nn.functional.normalize(ratio.detach(), dim=-1)
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
    with torch.no_grad():
        slope = 0.5 / mean
        curve = -0.25 / mean.square() * _shrinkage(variance / mean.square())
    return (_half_mean_log(a, b, c) - slope * first - curve * (second - variance)).mean(-1)


def _half_mean_log(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """E log sqrt(a r^2 + 2 b r + c) for r ~ N(0, 1)."""
    offset = b / a
    width = _sqrt(c / a - offset.square())
    return 0.5 * (a.log() + mean_log_square(offset, width))


def _sqrt(square: Tensor) -> Tensor:
    """The root of a square that rounding may have left below zero, with gradient zero there: the tip of the cone."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


@torch.no_grad()
def _local_shape(
    mean_a: Tensor, variance_a: Tensor, mean_b_squared: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How the integral over r depends on A (to second order) and B^2 (to first), by differences over their spread.

    Any values leave the estimate unbiased; these make its variance low.
    """
    step = torch.minimum(torch.maximum(variance_a.sqrt(), 1e-4 * mean_a), 0.5 * mean_a)
    reference = torch.maximum(mean_b_squared, 1e-8 * mean_a.square())
    root = reference.sqrt()
    here, above, below = (_half_mean_log(a, root, c) for a in (mean_a, mean_a + step, mean_a - step))
    slope_a = (above - below) / (2.0 * step)
    curve_a = 0.5 * (above - 2.0 * here + below) / step.square() * _shrinkage(variance_a / mean_a.square())
    slope_b = (here - _half_mean_log(mean_a, torch.zeros_like(root), c)) / reference
    return slope_a, curve_a, slope_b


def _shrinkage(relative_variance: Tensor) -> Tensor:
    """Where a square varies much, a parabola overstates the bend of its log; the 4 is near the best of those tried."""
    return 1.0 / (1.0 + 4.0 * relative_variance)


def num_directions(num_elements: int) -> int:
    """How many directions a mean is taken over, for a batch of events with so many elements in all."""
    return max(NUM_DIRECTIONS, math.ceil(_LEAST_DRAWS / num_elements))


def _noise(like: Tensor) -> Tensor:
    """Standard normal noise for each direction, ``[*batch, directions, D]``."""
    shape = (*like.shape[:-1], num_directions(like.numel()), like.shape[-1])
    generator = None
    if DIRECTION_SEED is not None:
        generator = torch.Generator(like.device).manual_seed((DIRECTION_SEED + _STREAM) % 2**63)
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


def _project(directions: Tensor, vector: Tensor) -> Tensor:
    """The inner product with each direction, ``[*batch, directions]``."""
    return (directions @ vector.unsqueeze(-1)).squeeze(-1)
