# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How a draw of the von Mises-Fisher cosine moves with the concentration, its distribution function held fixed."""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from numpy.polynomial import polynomial as poly
from torch import Tensor

from pyro_radial._pyro.compat import constant_in_graphs
from pyro_radial.distributions.special import mean_cosine_gap
from pyro_radial.distributions.vmf.bessel_expansion import expansion_polynomials
from pyro_radial.distributions.vmf.formulas import uniform_variables

__all__ = ["implicit_slope", "slope_polynomials"]

# From here on 13 terms are good for 1e-11 down to 6 standard deviations below the mean; the recurrence adds nothing.
LEAST_LAMBDA = 12.0
NUM_TERMS = 13
_TOLERANCE = 1e-13
# The draws, in standard deviations from the mean, for which the number of terms is chosen.
_STDDEVS = (-6.0, 0.0, 4.0)
# Rounding may carry g out of its range by less than this.
_SLACK = 1e-6


def implicit_slope(concentration: Tensor, one_minus_cosine: Tensor, dim: int) -> Tensor:
    r"""g, by which :math:`dw / d\kappa = (1 - w^2)\, g`, in differentiable operations.

    With :math:`f(w) \propto (1 - w^2)^{(m-3)/2} e^{\kappa w}` the density of the cosine and A its mean,

    .. math:: \frac{dw}{d\kappa} = \tau(w) = \frac1{f(w)} \int_w^1 (v - A) f(v)\, dv = (1 - w^2)\, g(w).

    This is implicit reparameterization (Figurnov, Mohamed and Mnih, 2018): whatever made the draw, rejections included,
    it gives an unbiased gradient without a correction term. Uniformly in the concentration, with :math:`\lambda =
    (m-1)/2`,

    .. math:: g = \frac1\lambda \sum_k \frac{\gamma_k(t, \xi)}{\lambda^k}, \qquad \gamma_0 = \frac{t \xi}2, \quad
        \gamma_k = -\frac{t \xi^2}4 \cdot
        \frac{(1-t) P_k + [2 (1+t) \xi - t (1+t) \xi^2 - 2]\, \partial_\xi \gamma_{k-1}}{1 - \xi},

    with t, :math:`a_0` and P_k of :mod:`~pyro_radial.distributions.vmf.bessel_expansion` and
    :math:`\xi = (1 + a_0^2) / (1 + a_0 w)`. Each division is exact, and every power of :math:`\xi` comes with one of t:
        the
    series is a polynomial in t and :math:`s = t \xi`, which is never much above 2.

    In few dimensions the expansion is used for :math:`m + 2n` and an exact recurrence leads down,

    .. math:: g_m = \frac{(1 - A_m) + A_m d\, [1 - \kappa (2 - d)\, g_{m+2}]}{m - 1}, \qquad d = 1 - w.

    :param Tensor concentration: at least 0, ``[*batch]``.
    :param Tensor one_minus_cosine: d, between 0 and 2, of the same shape.
    :param int dim: m, at least 2.
    """
    lam = 0.5 * (dim - 1)
    shift = max(0, math.ceil(LEAST_LAMBDA - lam))
    top = dim + 2 * shift
    slope = _expansion(concentration, one_minus_cosine, lam + shift)
    gap = mean_cosine_gap(concentration, top + 2)
    for b in range(top, dim - 1, -2):
        # From kappa (1 - A) two dimensions above to A and 1 - A, without a difference.
        complement = b - gap
        mean, one_minus_mean = (part / (concentration + complement) for part in (concentration, complement))
        gap = mean * complement
        if b < top:
            inner = 1.0 - concentration * (2.0 - one_minus_cosine) * slope
            slope = (one_minus_mean + mean * one_minus_cosine * inner) / (b - 1)
    # Its exact range, which the series may leave far in the tails.
    least, most = one_minus_mean * ((1.0 - _SLACK) / (dim - 1)), (1.0 + mean) * ((1.0 + _SLACK) / (dim - 1))
    return slope.clamp(least, most)


def _expansion(concentration: Tensor, one_minus_cosine: Tensor, lam: float) -> Tensor:
    v = uniform_variables(concentration, lam)
    t = v.t
    s = 2.0 * t / ((1.0 + t) * (v.one_minus_a0 + v.a0 * (2.0 - one_minus_cosine)))
    table = _coefficients(lam, s)
    rows, columns = table.shape
    return ((_powers(t, columns) @ table.mT) * _powers(s, rows)).sum(-1)


def _powers(base: Tensor, count: int) -> Tensor:
    """The powers 0, 1, ... of a positive number, in a new last dimension."""
    return (base.log().unsqueeze(-1) * torch.arange(count, dtype=base.dtype, device=base.device)).exp()


def _coefficients(lam: float, like: Tensor) -> Tensor:
    """The coefficients of s^j t^i in g."""
    if torch.compiler.is_compiling():
        return torch.tensor(_table(lam), dtype=like.dtype, device=like.device)
    return _kept_coefficients(lam, like.dtype, like.device)


@lru_cache(maxsize=256)
def _kept_coefficients(lam: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """They stay on the device, since no copy from the host may be in a captured graph, or make it wait."""
    return torch.tensor(_table(lam), dtype=dtype, device=device)


@constant_in_graphs
def _table(lam: float) -> list[list[float]]:
    """As many terms as it takes, summed."""
    terms = [np.array(gamma, dtype=float) / lam ** (k + 1) for k, gamma in enumerate(slope_polynomials())]
    count = next((k for k, term in enumerate(terms) if _largest_share(term, lam) < _TOLERANCE), len(terms))
    table = np.zeros_like(terms[count - 1])
    for term in terms[:count]:
        table[: term.shape[0], : term.shape[1]] += term
    return table.tolist()


def _largest_share(term: np.ndarray, lam: float) -> float:
    """The largest absolute value of a term over the leading one, where draws lie."""
    t = np.linspace(0.01, 1.0, 100)
    stddev = 0.5 * t * np.sqrt((1.0 - t) / lam)
    return max(
        float(np.abs(poly.polyval2d(s, t, term) * 2.0 * lam / s).max())
        for s in (t / (1.0 + z * stddev) for z in _STDDEVS)
    )


@lru_cache(maxsize=1)
def slope_polynomials() -> list[np.ndarray]:
    r"""The :math:`\gamma_k` for k = 0, 1, ..., as exact coefficients of :math:`s^j t^i`, j along the rows."""
    one = Fraction(1)
    t, one_plus_t = np.array([0 * one, one]), np.array([one, one])
    # As coefficients of powers of xi, each a polynomial in t.
    gammas = [[np.array([0 * one]), t / 2]]
    for k in range(1, NUM_TERMS):
        bracket = [np.array([0 * one])] * (len(gammas[-1]) + 1)
        bracket[0] = poly.polymul(np.array([one, -one]), expansion_polynomials()[0][k])
        for j, coefficient in enumerate(gammas[-1][1:]):
            slope = (j + 1) * coefficient
            bracket[j] = poly.polysub(bracket[j], 2 * slope)
            bracket[j + 1] = poly.polyadd(bracket[j + 1], 2 * poly.polymul(one_plus_t, slope))
            bracket[j + 2] = poly.polysub(bracket[j + 2], poly.polymul(t, poly.polymul(one_plus_t, slope)))
        # Division by 1 - xi is summation; the last sum is the remainder, zero.
        quotient, total = [np.array([0 * one])] * 2, np.array([0 * one])
        for coefficient in bracket[:-1]:
            total = poly.polyadd(total, coefficient)
            quotient.append(-poly.polymul(t, total) / 4)
        gammas.append(quotient)
    return [_without_xi(gamma) for gamma in gammas]


def _without_xi(gamma: list[np.ndarray]) -> np.ndarray:
    """Coefficients of s^j t^i from those of xi^j t^i."""
    rows = [np.trim_zeros(coefficient[j:], "b") for j, coefficient in enumerate(gamma)]
    table = np.full((len(rows), max(len(row) for row in rows)), Fraction(0))
    for row, coefficients in zip(table, rows, strict=True):
        row[: len(coefficients)] = coefficients
    return table
