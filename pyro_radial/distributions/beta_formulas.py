# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The scalars of a beta distribution of which one parameter is fixed, and how its draw moves with the other."""

import math
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from pyro_radial._pyro.compat import constant_in_graphs
from pyro_radial.distributions.chunks import by_chunks

__all__ = ["complement_slope", "log_rise", "log_rise_curvature", "log_rise_slope", "nodes_and_weights"]

# Stirling's series, B_{2k} / (2k (2k - 1)) for k = 1, 2, ...: good to 1e-15 from arguments of 8 on.
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_LEAST_ARGUMENT = 8.0
# From here on the integrand of the slope has no singularity near its range.
_LEAST_BETA = 6.0
# The integrand is followed until a quadratic like its exponent is at minus this, far more than it takes: where a
# parameter is small the exponent itself is less by a factor of up to 3.
_RANGE = 110.0
_NUM_NODES = 32
# Elements at a time, each of which has so many points.
_CHUNK = 2**9


def log_rise(alpha: Tensor, beta: float) -> Tensor:
    r""":math:`T = \log\Gamma(\alpha + \beta) - \log\Gamma(\alpha)`, without the difference of large numbers.

    :param Tensor alpha: at least ``beta``, of any shape.
    :param float beta: positive.

    >>> log_rise(torch.tensor([2.0, 4.0]), 2.0).exp()
    tensor([ 6.0000, 20.0000])
    """
    x = alpha + _steps(beta)
    y = x + beta
    value = (x - 0.5) * (beta / x).log1p() + beta * (y.log() - 1.0) + (_stirling(y) - _stirling(x))
    for j in range(_steps(beta)):
        value = value - (beta / (alpha + j)).log1p()
    return value


def log_rise_slope(alpha: Tensor, beta: float) -> Tensor:
    r""":math:`T' = \psi(\alpha + \beta) - \psi(\alpha)`, which is :math:`-E \log z` for z of Beta(alpha, beta).

    Arguments as for :func:`log_rise`.

    >>> log_rise_slope(torch.tensor(3.0), 1.0)
    tensor(0.3333)
    """
    x = alpha + _steps(beta)
    value = (beta / x).log1p() + (_log_less_digamma(x) - _log_less_digamma(x + beta))
    for j in range(_steps(beta)):
        value = value + beta / ((alpha + j) * (alpha + (j + beta)))
    return value


def log_rise_curvature(alpha: Tensor, beta: float) -> Tensor:
    r""":math:`-T'' = \psi'(\alpha) - \psi'(\alpha + \beta)`, the variance of :math:`\log z`.

    Arguments as for :func:`log_rise`.

    >>> log_rise_curvature(torch.tensor(3.0), 1.0)
    tensor(0.1111)
    """
    x = alpha + _steps(beta)
    y = x + beta
    value = beta / (x * y) + (_trigamma_less_inverse(x) - _trigamma_less_inverse(y))
    for j in range(_steps(beta)):
        low, high = alpha + j, alpha + (j + beta)
        value = value + beta * (low + high) / (low * high).square()
    return value


def complement_slope(alpha: Tensor, complement: Tensor, beta: float) -> Tensor:
    r"""g, by which :math:`dy / d\alpha = -y (1 - y)\, g` for the draw y = 1 - z of a z of Beta(alpha, beta).

    The distribution function of the draw is held fixed (implicit reparameterization; Figurnov, Mohamed and Mnih, 2018).
    With :math:`c = E \log z = -T'` and f the density of y, :math:`f \propto y^{\beta - 1} (1 - y)^{\alpha - 1}`,

    .. math:: y (1 - y)\, g\, f(y) = \int_0^y [\log(1 - u) - c]\, f(u)\, du = -\int_y^1 [\log(1 - u) - c]\, f(u)\, du.

    The integrand has one sign on the first side where :math:`\log(1 - y) > c`, on the other one elsewhere; there,
    in the logarithm of the distance from the end, Gauss-Legendre with 32 points is good to 3e-10. In few dimensions
    that is done with alpha and beta larger by n, where nothing is singular near, and two exact recurrences lead down,

    .. math:: \alpha\, g_{\alpha, \beta+1} &= (\alpha + \beta + 1) (1 - y)\, g_{\alpha+1, \beta+1}
            - [\log(1 - y) + \psi(\alpha + \beta + 1) - \psi(\alpha + 1)], \\
        \beta\, g_{\alpha, \beta} &= (\alpha + \beta)\, y\, g_{\alpha, \beta+1}
            + [\log(1 - y) + \psi(\alpha + \beta) - \psi(\alpha)].

    The gradient of ``torch.distributions.Beta`` is that of an approximation, off by up to 0.14 % here.

    :param Tensor alpha: at least ``beta``, ``[*batch]``.
    :param Tensor complement: y, between 0 and 1, of the same shape.
    :param float beta: at least 1/2.
    """
    if torch.is_grad_enabled():
        return _slope(alpha, complement, beta)
    return by_chunks(partial(_slope, beta=beta), (alpha, complement), _CHUNK)


def _slope(alpha: Tensor, complement: Tensor, beta: float) -> Tensor:
    shift = max(0, math.ceil(_LEAST_BETA - beta))
    rise = log_rise_slope(alpha + shift, beta + shift)
    slope = _integral_slope(alpha + shift, complement, beta + shift, rise)
    log_z = (-complement).log1p()
    for k in reversed(range(shift)):
        a, b = alpha + k, beta + k
        # psi(a + b + 1) - psi(a + 1), and then psi(a + b) - psi(a).
        rise = rise - 1.0 / (a + (b + 1.0))
        slope = ((a + (b + 1.0)) * (1.0 - complement) * slope - (log_z + rise)) / a
        rise = rise + b / (a * (a + b))
        slope = ((a + b) * complement * slope + (log_z + rise)) / b
    return slope


def _integral_slope(alpha: Tensor, y: Tensor, beta: float, rise: Tensor) -> Tensor:
    """The slope by quadrature, for parameters of 6 at least."""
    excess = (-y).log1p() + rise
    low = excess > 0.0
    # The distance from the end that the range leads to, its exponent, and that of the other distance, less one.
    edge, other = torch.where(low, y, 1.0 - y), torch.where(low, 1.0 - y, y)
    rate, power = torch.where(low, beta, alpha), torch.where(low, alpha, torch.full_like(alpha, beta)) - 1.0
    odds = edge / other
    # The exponent is concave, with these derivatives at 0.
    first, second = rate - power * odds, power * odds * (1.0 + odds)
    span = 2.0 * _RANGE / (first + (first.square() + 2.0 * _RANGE * second).sqrt())
    nodes, weights = nodes_and_weights(_NUM_NODES, alpha)
    x = nodes.square() * span
    log_ratio = (-(-x).expm1() * odds).log1p()
    integrand = (excess.abs() + torch.where(low, log_ratio, x)) * (power * log_ratio - rate * x).exp()
    return (2.0 * nodes * weights * integrand).sum(0) * span / other


def nodes_and_weights(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre on (0, 1), along a first dimension that broadcasts over the tensor's own.

    >>> nodes, weights = nodes_and_weights(3, torch.zeros(2, 4))
    >>> nodes.shape, (weights * nodes**5).sum()
    (torch.Size([3, 1, 1]), tensor(0.1667))
    """
    make = _legendre if torch.compiler.is_compiling() else _kept_legendre
    nodes, weights = make(count, like.dtype, like.device).view(2, count, *(1,) * like.dim()).unbind(0)
    return nodes, weights


def _legendre(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_legendre_numbers(count), dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _kept_legendre(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """They stay on the device, since no copy from the host may be in a captured graph, or make it wait."""
    return _legendre(count, dtype, device)


@constant_in_graphs
def _legendre_numbers(count: int) -> list[list[float]]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return [(0.5 * (1.0 + nodes)).tolist(), (0.5 * weights).tolist()]


def _steps(beta: float) -> int:
    """How many steps up Stirling's series is taken."""
    return max(0, math.ceil(_LEAST_ARGUMENT - beta))


def _stirling(x: Tensor) -> Tensor:
    """What log Gamma is more than Stirling's formula."""
    return _odd_series(x, _STIRLING)


def _log_less_digamma(x: Tensor) -> Tensor:
    """The logarithm less its limit psi."""
    inverse = x.reciprocal()
    slopes = tuple((2 * k + 1) * term for k, term in enumerate(_STIRLING))
    return 0.5 * inverse + inverse * _odd_series(x, slopes)


def _trigamma_less_inverse(x: Tensor) -> Tensor:
    inverse = x.reciprocal()
    slopes = tuple((2 * k + 1) * (2 * k + 2) * term for k, term in enumerate(_STIRLING))
    return inverse.square() * (0.5 + _odd_series(x, slopes))


def _odd_series(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """The sum of c_k / x^(2k + 1)."""
    inverse = x.reciprocal()
    square = inverse.square()
    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * square + coefficient
    return value * inverse
