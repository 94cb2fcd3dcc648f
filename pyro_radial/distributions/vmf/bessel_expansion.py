# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Coefficients of the uniform expansion of the Bessel ratio :math:`A = I_{m/2} / I_{m/2-1}`, once per dimension m."""

import math
import operator
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial import polynomial as poly

from pyro_radial._pyro.compat import constant_in_graphs

__all__ = ["BesselPlan", "bessel_plan", "expansion_polynomials"]

# From here on so many terms give A to a rounding of float64, and its second derivative to 3e-14.
LEAST_LAMBDA = 20.0
NUM_TERMS = 14
# What economising a series may change in it.
_TOLERANCE = 1e-17


class BesselPlan(NamedTuple):
    r"""What the dimension alone decides: plain numbers.

    The series are coefficients of powers of :math:`x = 2t - 1`, the highest first.
    """

    dim: int
    shift: int  # n: the expansion is used at dimension m + 2n
    lam: float  # (m - 1) / 2
    shifted_lam: float  # lambda at dimension m + 2n
    rungs: tuple[int, ...]  # the dimensions m + 2n - 2, ..., m down to which the recurrence steps
    ratio: tuple[float, ...]  # (F - 1) / t^2
    slope: tuple[float, ...]  # (G - 1) / t, where G = F - (1 - t^2) F'
    curvature: tuple[float, ...]  # H = (2 + t) G + t (1 + t) G'
    integral: tuple[float, ...]  # R, by which the integral of A differs from its leading terms, over 1 - t


def bessel_plan(dim: int) -> BesselPlan:
    r"""The coefficients for the von Mises-Fisher distribution on the unit sphere of R^dim.

    With :math:`\lambda = (m-1)/2` the ratio solves :math:`A' = 1 - A^2 - 2\lambda A / \kappa`, and with
    :math:`t = \lambda / \sqrt{\kappa^2 + \lambda^2}`, :math:`a_0 = \kappa / (\sqrt{\kappa^2 + \lambda^2} + \lambda)`

    .. math:: A = a_0 F(t), \qquad F = \sum_k P_k(t) / \lambda^k,

    for every :math:`\kappa \ge 0` at once. The derivatives of A and the integral of A have such a form too. Below
    ``LEAST_LAMBDA`` the expansion is used at a dimension 2n higher and a recurrence in steps of 2 leads down.

    :param int dim: m, at least 2.
    :raises ValueError: if ``dim`` is not an integer, or less than 2.

    >>> bessel_plan(500).shift
    0
    >>> plan = bessel_plan(2)
    >>> plan.lam, plan.shift, plan.shifted_lam
    (0.5, 20, 20.5)
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(f"dim must be an integer, got {dim!r}")
    # Under torch.compile a size may be a symbol; as an index it is a number, and the plan a constant of the graph.
    return _constant_plan(operator.index(dim))


@constant_in_graphs
def _constant_plan(dim: int) -> BesselPlan:
    return _cached_plan(dim)


@lru_cache(maxsize=256)
def _cached_plan(dim: int) -> BesselPlan:
    if dim < 2:
        raise ValueError(
            f"dim must be at least 2, got {dim}: a direction in R^1 is only a sign, use a normal or a Bernoulli sign"
        )
    lam = 0.5 * (dim - 1)
    shift = max(0, math.ceil(LEAST_LAMBDA - lam))
    f, r = _series(lam + shift)
    t = Polynomial([0.0, 1.0])
    g = f - (1.0 - t**2) * f.deriv()
    return BesselPlan(
        dim=dim,
        shift=shift,
        lam=lam,
        shifted_lam=lam + shift,
        rungs=tuple(range(dim + 2 * shift - 2, dim - 1, -2)),
        ratio=_economise(Polynomial(f.coef[2:])),
        slope=_economise(Polynomial(g.coef[1:])),
        curvature=_economise((2.0 + t) * g + t * (1.0 + t) * g.deriv()),
        integral=_economise(r),
    )


def _series(lam: float) -> tuple[Polynomial, Polynomial]:
    """F and R as polynomials in t."""
    f, r = np.zeros(3 * NUM_TERMS), np.zeros(3 * NUM_TERMS)
    for k, (p, integral) in enumerate(zip(*expansion_polynomials(), strict=True)):
        f[: len(p)] += np.array(p, dtype=float) / lam**k
        r[: len(integral)] += np.array(integral, dtype=float) / lam ** (k - 1)
    return Polynomial(f), Polynomial(r)


@lru_cache(maxsize=1)
def expansion_polynomials() -> tuple[list[np.ndarray], list[np.ndarray]]:
    r"""P_k and R_k for k = 0, 1, ..., as exact coefficients of powers of t, the lowest first.

    .. math::
        P_0 = 1, \quad P_k = -\tfrac12 \Big\{ t^2 [P_{k-1} - (1 - t^2) P_{k-1}']
            + (1 - t) \sum_{i=1}^{k-1} P_i P_{k-i} \Big\}, \quad
        (1 - t) R_k = \int_t^1 \frac{P_k(s)}{s^2 (1 + s)} ds \quad (k \ge 2).
    """
    one, half = Fraction(1), Fraction(1, 2)
    one_minus_t, one_plus_t = np.array([one, -one]), np.array([one, one])
    p, r = [np.array([one])], [np.array([0 * one]), np.array([0 * one])]
    for k in range(1, NUM_TERMS + 1):
        change = poly.polysub(p[-1], poly.polymul(poly.polymul(one_minus_t, one_plus_t), poly.polyder(p[-1])))
        total = poly.polymul(np.array([0 * one, 0 * one, one]), change)
        for i in range(1, k):
            total = poly.polyadd(total, poly.polymul(one_minus_t, poly.polymul(p[i], p[k - i])))
        p.append(-half * total)
        if k >= 2:
            integrand = poly.polydiv(p[k][2:], one_plus_t)[0]
            antiderivative = poly.polyint(integrand)
            antiderivative[0] = -sum(antiderivative[1:])
            r.append(-poly.polydiv(antiderivative, one_minus_t)[0])
    return p, r


def _economise(series: Polynomial) -> tuple[float, ...]:
    """The shortest polynomial in x = 2t - 1 within the tolerance of ``series`` for t from 0 to 1."""
    chebyshev = series.convert(kind=Chebyshev, domain=[0.0, 1.0])
    dropped = np.cumsum(np.abs(chebyshev.coef[::-1])) < _TOLERANCE
    short = chebyshev.truncate(max(2, len(dropped) - int(dropped.sum())))
    return tuple(short.convert(kind=Polynomial, domain=[0.0, 1.0]).coef[::-1].tolist())
