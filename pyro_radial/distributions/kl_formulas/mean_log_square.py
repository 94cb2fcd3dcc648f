# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mean logarithm of the squared distance from a point of the plane to a normal variable on a line."""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_radial.distributions.chunks import by_chunks

__all__ = ["MEAN_LOG_CHI_SQUARED", "TERMS", "excess_log_square", "mean_log_square", "slopes_of_log_square", "terms_for"]

# E log r^2 for r ~ N(0, 1).
MEAN_LOG_CHI_SQUARED = -(0.57721566490153286061 + math.log(2.0))
# Terms of the expansion: its error is below 1e-13, and with fewer of them 1e-8, below a digit of float32.
TERMS, _FEW_TERMS = 32, 20
# Points at a time, so that a step of the recurrence stays in the processor's cache.
_CHUNK = 2**15


class _Expansion(NamedTuple):
    """Weideman's map parameter L, and coefficients of polynomials, the highest power first."""

    width: float
    slopes: tuple[float, ...]  # the Faddeeva function
    quotient: tuple[float, ...]  # its integral less that at Z = 1, over Z - 1


def _expansion(terms: int) -> _Expansion:
    width = math.sqrt(terms / math.sqrt(2.0))
    angles = np.arange(-2 * terms + 1, 2 * terms) * (math.pi / (2 * terms))
    points = width * np.tan(0.5 * angles)
    samples = np.concatenate([[0.0], np.exp(-(points**2)) * (width**2 + points**2)])
    coefficients = np.fft.fft(np.fft.fftshift(samples)).real[1 : terms + 1] / (4 * terms)
    powers = -2.0 * math.sqrt(math.pi) / width * coefficients / np.arange(1, terms + 1)
    # The sum of p_k (Z^k - 1) over Z - 1: its coefficients are sums of those of all higher powers.
    return _Expansion(width, tuple(coefficients[::-1].tolist()), tuple(np.cumsum(powers[::-1]).tolist()))


_EXPANSIONS = {terms: _expansion(terms) for terms in (TERMS, _FEW_TERMS)}


def terms_for(dtype: torch.dtype) -> int:
    """How many terms of the expansion give the digits of a dtype.

    Example::

        >>> terms_for(torch.float32) < terms_for(torch.float64)
        True
    """
    return TERMS if dtype == torch.float64 else _FEW_TERMS


def mean_log_square(offset: Tensor, width: Tensor) -> Tensor:
    r"""E log((r + b)^2 + c^2) for r ~ N(0, 1), to 1e-13 in float64, without a branch or a singularity.

    It is :math:`2\,\mathrm{Re}\,E \log(z + r)` at z = b + ic, whose derivative in z is
    :math:`-i\sqrt{2\pi}\, w(z / \sqrt2)` with the Faddeeva function w. Weideman (1994), "Computation of the complex
    error function", SIAM J. Numer. Anal. 31, expands w in powers of :math:`Z = (L + i\zeta) / (L - i\zeta)` with
    :math:`\zeta = z / \sqrt2`, which integrates in closed form. Unlike Gauss-Hermite quadrature it holds at b = c = 0,
    where the logarithm is singular.

    :param Tensor offset: b, any real numbers.
    :param Tensor width: c, at least zero; broadcasts with b.

    Example::

        >>> zero = torch.zeros((), dtype=torch.double)
        >>> bool(torch.isclose(mean_log_square(zero, zero), torch.tensor(-0.5772156649015329 - math.log(2.0)).double()))
        True
    """
    return excess_log_square(offset, width) + MEAN_LOG_CHI_SQUARED


def excess_log_square(offset: Tensor, width: Tensor, terms: int = TERMS) -> Tensor:
    """By how much :func:`mean_log_square` exceeds its value at b = c = 0: there exactly zero.

    :param Tensor offset: b, any real numbers.
    :param Tensor width: c, at least zero; broadcasts with b.
    :param int terms: of the expansion.

    Example::

        >>> excess_log_square(torch.zeros(()), torch.zeros(()))
        tensor(0.)
    """
    value: Tensor = _Excess.apply(*torch.broadcast_tensors(offset, width), terms)
    return value


def slopes_of_log_square(offset: Tensor, width: Tensor, terms: int = TERMS) -> tuple[Tensor, Tensor]:
    """The derivatives of :func:`mean_log_square` in b and c, for tensors of one shape.

    Arguments as for :func:`excess_log_square`.

    Example::

        >>> slopes_of_log_square(torch.zeros(()), torch.zeros(()))
        (tensor(0.), tensor(2.5066))
    """
    by_offset, by_width = _Slope.apply(offset, width, terms).unbind(0)
    return by_offset, by_width


class _Excess(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(b: Tensor, c: Tensor, terms: int) -> Tensor:
        return by_chunks(partial(_excess, expansion=_EXPANSIONS[terms]), (b, c), _CHUNK)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.terms = inputs[2]
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        by_b, by_c = _Slope.apply(*ctx.saved_tensors, ctx.terms).unbind(0)
        return grad * by_b, grad * by_c, None

    @staticmethod
    def jvp(ctx: Any, b_tangent: Tensor, c_tangent: Tensor, _: None) -> Tensor:
        by_b, by_c = _Slope.apply(*ctx.saved_tensors, ctx.terms).unbind(0)
        return by_b * b_tangent + by_c * c_tangent


class _Slope(torch.autograd.Function):
    r"""The derivatives in b and c, stacked. With :math:`F' = \partial_b - i \partial_c`, :math:`F'' = 2 - z F'`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(b: Tensor, c: Tensor, terms: int) -> Tensor:
        return by_chunks(partial(_slope, expansion=_EXPANSIONS[terms]), (b, c), _CHUNK)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.save_for_forward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        b, c, slope = ctx.saved_tensors
        by_b, by_c = grad.unbind(0)
        return *_curve(b, c, slope, by_b, by_c), None

    @staticmethod
    def jvp(ctx: Any, b_tangent: Tensor, c_tangent: Tensor, _: None) -> Tensor:
        # The matrix of second derivatives is symmetric.
        b, c, slope = ctx.saved_tensors
        return torch.stack(_curve(b, c, slope, b_tangent, c_tangent))


def _curve(b: Tensor, c: Tensor, slope: Tensor, by_b: Tensor, by_c: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix of second derivatives times a vector."""
    first, second = slope.unbind(0)
    straight, mixed = 2.0 - (b * first + c * second), c * first - b * second
    return by_b * straight + by_c * mixed, by_b * mixed - by_c * straight


def _excess(b: Tensor, c: Tensor, expansion: _Expansion) -> Tensor:
    wide = expansion.width
    x, y = b / math.sqrt(2.0), c / math.sqrt(2.0)
    real, imag, square = _mapped(x, y, wide)
    value_real, value_imag = _polynomial(expansion.quotient, real, imag)
    # Z - 1 is 2 i zeta / (L - i zeta), without a difference.
    up, size = y + wide, 2.0 / square
    less_real, less_imag = -(x * x + y * up) * size, x * (up - y) * size
    log_square = ((y * (y + 2.0 * wide) + x * x) / (wide * wide)).log1p()
    return log_square + (less_real * value_real - less_imag * value_imag)


def _slope(b: Tensor, c: Tensor, expansion: _Expansion) -> Tensor:
    wide = expansion.width
    x, y = b / math.sqrt(2.0), c / math.sqrt(2.0)
    real, imag, square = _mapped(x, y, wide)
    value_real, value_imag = _polynomial(expansion.slopes, real, imag)
    # 1 / (L - i zeta) is h; w = h (2 h P + 1 / sqrt(pi)).
    h_real, h_imag = (y + wide) / square, x / square
    inner_real = 2.0 * (h_real * value_real - h_imag * value_imag) + 1.0 / math.sqrt(math.pi)
    inner_imag = 2.0 * (h_real * value_imag + h_imag * value_real)
    w_real = h_real * inner_real - h_imag * inner_imag
    w_imag = h_real * inner_imag + h_imag * inner_real
    return math.sqrt(2.0 * math.pi) * torch.stack([w_imag, w_real])


def _mapped(x: Tensor, y: Tensor, wide: float) -> tuple[Tensor, Tensor, Tensor]:
    """Z as its real and imaginary part, and the squared absolute value of L - i zeta."""
    up, down = y + wide, wide - y
    square = up * up + x * x
    return (up * down - x * x) / square, x * (up + down) / square, square


def _polynomial(coefficients: tuple[float, ...], real: Tensor, imag: Tensor) -> tuple[Tensor, Tensor]:
    """A polynomial with real coefficients, the highest power first, at complex points, by a real recurrence."""
    twice, square = 2.0 * real, real * real + imag * imag
    terms = torch.tensor(coefficients, dtype=real.dtype, device=real.device).unbind(0)
    older, value = torch.full_like(real, coefficients[0]), coefficients[0] * twice + coefficients[1]
    for term in terms[2:-1]:
        older, value = value, torch.addcmul(torch.addcmul(term, twice, value), square, older, value=-1.0)
    return value * real + (coefficients[-1] - square * older), value * imag
