# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Directions, and the mean log-distance along one of them, for the divergences to a radial distribution."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from pyro import settings
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.distributions.numerics import by_chunks, to_accumulation_dtype

# The number of directions, and the least number of draws for all elements: a small event is noisier, and cheap; in a
# batch of small events the noise averages out. The noise is then below 1 % of max(KL, 100 nats) in every measured
# case (benchmarks/PAST.md).
NUM_DIRECTIONS = 2
_LEAST_DRAWS = 1000
# A fixed seed makes a KL a function of its parameters; None draws fresh directions from torch's global generator.
DIRECTION_SEED: int | None = 0
# Added to the seed: a user's own seed is often 0 too, and means drawn with it would lie along the directions.
_STREAM = 0x5851F42D
# Up to this many weighted directions are added one by one.
_FEW_DIRECTIONS = 8
# Terms of the expansion: the error is below 1e-13, and with fewer terms below 1e-8, less than a digit of float32.
ALL_TERMS = 32
_FEW_TERMS = 20
# Points at a time, so that each step of the recurrence stays in the processor's cache.
_POINTS_AT_ONCE = 2**15


settings.register(
    "radial_kl_directions",
    __name__,
    "NUM_DIRECTIONS",
    partial(positive_count, "radial_kl_directions"),
)
settings.register("radial_kl_seed", __name__, "DIRECTION_SEED")


def num_directions(num_elements: int) -> int:
    """Return the number of directions for a batch of events with this many elements in all."""
    return max(NUM_DIRECTIONS, math.ceil(_LEAST_DRAWS / max(num_elements, 1)))


def directions(like: Tensor) -> Tensor:
    """Return standard normal noise along each direction, ``[*batch, directions, D]``, for events ``[*batch, D]``."""
    shape = (*like.shape[:-1], num_directions(like.numel()), like.shape[-1])
    if DIRECTION_SEED is None:
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    seed = (DIRECTION_SEED + _STREAM) % 2**63
    return _fixed_noise(list(shape), seed, like.dtype, like.device)


# A custom operator, because neither a compiler nor vmap accepts a generator.
@torch.library.custom_op("pyro_radial::fixed_noise", mutates_args=())
def _fixed_noise(shape: list[int], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(
        tuple(shape),
        dtype=dtype,
        device=device,
        generator=torch.Generator(device).manual_seed(seed),
    )


@_fixed_noise.register_fake
def _(shape: list[int], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def project(directions: Tensor, vector: Tensor) -> Tensor:
    """Return the inner product with each direction, ``[directions, *batch]``, in the accumulation dtype."""
    products = (directions @ vector.unsqueeze(-1)).squeeze(-1)
    return to_accumulation_dtype(products.movedim(-1, 0).contiguous())


def combine(weights: Tensor, directions: Tensor) -> Tensor:
    """Return the sum of the directions, ``[*batch, D]``, with weights ``[directions, *batch, 1]``."""
    if len(weights) > _FEW_DIRECTIONS:
        return (weights.squeeze(-1).movedim(0, -1).unsqueeze(-2) @ directions).squeeze(-2)
    # A product of small matrices is slow.
    total = weights[0] * directions.select(-2, 0)
    for number in range(1, len(weights)):
        total = total + weights[number] * directions.select(-2, number)
    return total


def log_distance(
    a: Tensor, b: Tensor, c: Tensor, above: Tensor | None = None, terms: int = ALL_TERMS
) -> Tensor:
    r"""Return the mean log-distance from a point of the plane to a normal variable on a line.

    It is :math:`\tfrac12 E \log(a r^2 + 2 b r + c)` for :math:`r \sim N(0, 1)`, minus its value at a = 1, b = c = 0.
    If the caller knows more digits of a - 1 than a has, they are in ``above``.
    """
    offset, _, width = _nearest_point(a, b, c)
    log_a = a.log() if above is None else log_of_square(a.sqrt(), above)
    return 0.5 * (log_a + excess_log_square(offset, width, terms))


def log_distance_derivatives(
    a: Tensor, b: Tensor, c: Tensor, terms: int = ALL_TERMS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives of :func:`log_distance` in a, b and c, with the same arguments.

    At the tip of the cone, where the line meets the point, the derivative through the width is zero.
    """
    offset, square, width = _nearest_point(a, b, c)
    by_offset, by_width = excess_log_square_derivatives(offset, width, terms)
    by_square = torch.where(square > torch.finfo(square.dtype).tiny, by_width / width, 0.0)
    by_b = (by_offset - offset * by_square) * (0.5 / a)
    by_c = by_square * (0.25 / a)
    return 0.5 / a - (offset * by_b + (c / a) * by_c), by_b, by_c


def _nearest_point(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the r at which the line is nearest to the point, and the squared and plain distance there.

    The squared distance at r is ``a r^2 + 2 b r + c``; the two distances are in units of ``a.sqrt()``.
    """
    offset = b / a
    square = c / a - offset.square()
    # Rounding may leave the square below zero.
    return offset, square, square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


def log_of_square(root: Tensor, above: Tensor) -> Tensor:
    """Return the log of a square from its root and from the square minus one, with all digits near one."""
    return above.clamp(min=-0.5).log1p() + 2.0 * (root * math.sqrt(2.0)).clamp(max=1.0).log()


def shrinkage(relative_variance: Tensor) -> Tensor:
    """Return a factor for the curvature of a log, which a parabola overstates where squares vary (the 4 was tuned)."""
    return 1.0 / (1.0 + 4.0 * relative_variance)


class _Expansion(NamedTuple):
    """Weideman's map parameter L and coefficients of polynomials, the highest power first."""

    width: float
    slopes: tuple[float, ...]  # the Faddeeva function
    quotient: tuple[float, ...]  # its integral, minus the integral at Z = 1, over Z - 1


def _make_expansion(terms: int) -> _Expansion:
    width = math.sqrt(terms / math.sqrt(2.0))
    angles = np.arange(-2 * terms + 1, 2 * terms) * (math.pi / (2 * terms))
    points = width * np.tan(0.5 * angles)
    samples = np.concatenate([[0.0], np.exp(-(points**2)) * (width**2 + points**2)])
    coefficients = np.fft.fft(np.fft.fftshift(samples)).real[1 : terms + 1] / (4 * terms)
    powers = -2.0 * math.sqrt(math.pi) / width * coefficients / np.arange(1, terms + 1)
    # The sum of p_k (Z^k - 1) over Z - 1: each coefficient is the sum of p_k of all higher powers.
    return _Expansion(
        width, tuple(coefficients[::-1].tolist()), tuple(np.cumsum(powers[::-1]).tolist())
    )


_EXPANSIONS = {terms: _make_expansion(terms) for terms in (ALL_TERMS, _FEW_TERMS)}


def terms_for(dtype: torch.dtype) -> int:
    """Return how many terms of the expansion give all digits of a dtype."""
    return ALL_TERMS if dtype == torch.float64 else _FEW_TERMS


def excess_log_square(offset: Tensor, width: Tensor, terms: int = ALL_TERMS) -> Tensor:
    r"""Return :math:`E \log((r + b)^2 + c^2)` for :math:`r \sim N(0, 1)`, minus its value at b = c = 0.

    The mean is :math:`2\,\mathrm{Re}\,E \log(z + r)` at z = b + ic. Its derivative in z is
    :math:`-i\sqrt{2\pi}\, w(z / \sqrt2)` with the Faddeeva function w, which has an expansion in powers of
    :math:`Z = (L + i\zeta) / (L - i\zeta)`, :math:`\zeta = z / \sqrt2`, that integrates in closed form. It is good to
    1e-13 in float64, without a branch or a singularity; Gauss-Hermite quadrature fails at b = c = 0, where the
    logarithm is singular.

    Source: Weideman (1994), "Computation of the complex error function", SIAM J. Numer. Anal. 31.
    """
    return by_chunks(
        partial(_excess, expansion=_EXPANSIONS[terms]), (offset, width), _POINTS_AT_ONCE
    )


def excess_log_square_derivatives(offset: Tensor, width: Tensor, terms: int = ALL_TERMS) -> Tensor:
    """Return the derivatives of :func:`excess_log_square` in b and c, ``[2, ...]``, with the same arguments."""
    return by_chunks(
        partial(_slope, expansion=_EXPANSIONS[terms]), (offset, width), _POINTS_AT_ONCE
    )


def _excess(b: Tensor, c: Tensor, expansion: _Expansion) -> Tensor:
    wide = expansion.width
    x = b / math.sqrt(2.0)
    y = c / math.sqrt(2.0)
    real, imag, square = _map_to_disk(x, y, wide)
    value_real, value_imag = _polynomial(expansion.quotient, real, imag)
    # Z - 1 is 2 i zeta / (L - i zeta), without a difference.
    up = y + wide
    size = 2.0 / square
    less_real = -(x * x + y * up) * size
    less_imag = x * (up - y) * size
    log_square = ((y * (y + 2.0 * wide) + x * x) / (wide * wide)).log1p()
    return log_square + (less_real * value_real - less_imag * value_imag)


def _slope(b: Tensor, c: Tensor, expansion: _Expansion) -> Tensor:
    wide = expansion.width
    x = b / math.sqrt(2.0)
    y = c / math.sqrt(2.0)
    real, imag, square = _map_to_disk(x, y, wide)
    value_real, value_imag = _polynomial(expansion.slopes, real, imag)
    # 1 / (L - i zeta) is h; w = h (2 h P + 1 / sqrt(pi)).
    h_real = (y + wide) / square
    h_imag = x / square
    inner_real = 2.0 * (h_real * value_real - h_imag * value_imag) + 1.0 / math.sqrt(math.pi)
    inner_imag = 2.0 * (h_real * value_imag + h_imag * value_real)
    w_real = h_real * inner_real - h_imag * inner_imag
    w_imag = h_real * inner_imag + h_imag * inner_real
    return math.sqrt(2.0 * math.pi) * torch.stack([w_imag, w_real])


def _map_to_disk(x: Tensor, y: Tensor, wide: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return Z as its real and imaginary part, and the squared absolute value of L - i zeta."""
    up = y + wide
    down = wide - y
    square = up * up + x * x
    return (up * down - x * x) / square, x * (up + down) / square, square


def _polynomial(
    coefficients: tuple[float, ...], real: Tensor, imag: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a polynomial with real coefficients, the highest power first, at complex points, by a real recurrence."""
    twice = 2.0 * real
    square = real * real + imag * imag
    terms = torch.tensor(coefficients, dtype=real.dtype, device=real.device).unbind(0)
    older = torch.full_like(real, coefficients[0])
    value = coefficients[0] * twice + coefficients[1]
    for term in terms[2:-1]:
        newer = torch.addcmul(torch.addcmul(term, twice, value), square, older, value=-1.0)
        older, value = value, newer
    return value * real + (coefficients[-1] - square * older), value * imag
