# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The scalars of the von Mises-Fisher distribution as elementwise formulas; ``functions.py`` adds their derivatives.

The Bessel ratio :math:`A = I_{m/2} / I_{m/2-1}` has an expansion that is uniform in the concentration. Its coefficients
depend on the dimension m alone and are found once. Below a certain m the expansion is used at dimension m + 2n, and a
recurrence whose terms have one sign leads down in steps of 2. So each result is good to a few roundings of its own
size, in float32 too.

Throughout, kappa is the concentration, A the mean of the cosine w to the mean direction, and L the log of the mean of
exp(kappa w) under the uniform distribution, whose derivative is A. Further, M = kappa - L and U = kappa A - L.
"""

import math
import operator
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial import polynomial as poly
from torch import Tensor

from pyro_radial._pyro.compat import constant_in_graphs
from pyro_radial.distributions.numerics import by_chunks

# From this lambda on, 14 terms give A to a rounding of float64, and its second derivative to 3e-14.
LEAST_LAMBDA = 20.0
NUM_TERMS = 14
# The most that economising a series may change its value.
_SERIES_TOLERANCE = 1e-17
# Nodes and weights on (0, 1): 10 points give the integral over a factor of e to 5e-15.
_GAUSS_LEGENDRE = [
    (0.5 * (1.0 + x), 0.5 * w) for x, w in zip(*np.polynomial.legendre.leggauss(10), strict=True)
]
# Elements at a time; each has ten points.
_INTEGRALS_AT_ONCE = 2**10
# How many growth factors are multiplied before a logarithm is taken: fewer logarithms, and no overflow in float32.
_GROUP = 4


class BesselPlan(NamedTuple):
    r"""Hold the numbers that depend on the dimension m alone.

    A series is a tuple of coefficients of powers of :math:`x = 2t - 1`, the highest first.
    """

    lam: float  # (m - 1) / 2
    shifted_lam: float  # lambda at dimension m + 2n
    rungs: tuple[int, ...]  # the dimensions m + 2n - 2, ..., m down to which the recurrence steps
    ratio: tuple[float, ...]  # (F - 1) / t^2
    slope: tuple[float, ...]  # (G - 1) / t, where G = F - (1 - t^2) F'
    curvature: tuple[float, ...]  # H = (2 + t) G + t (1 + t) G'
    integral: tuple[
        float, ...
    ]  # R, what the integral of A has beyond its leading terms, over 1 - t


def bessel_plan(dim: int) -> BesselPlan:
    r"""Return the coefficients of the expansion for the unit sphere of R^dim.

    With :math:`\lambda = (m-1)/2` the ratio solves :math:`A' = 1 - A^2 - 2\lambda A / \kappa`, and with
    :math:`t = \lambda / \sqrt{\kappa^2 + \lambda^2}`, :math:`a_0 = \kappa / (\sqrt{\kappa^2 + \lambda^2} + \lambda)`

    .. math:: A = a_0 F(t), \qquad F = \sum_k P_k(t) / \lambda^k,

    for every :math:`\kappa \ge 0` at once, for m = dim of at least 2. The derivatives and the integral of A have the
    same form.
    """
    # Under torch.compile a size may be a symbol; as an index it is a number, and the plan is a constant of the graph.
    return _constant_plan(operator.index(dim))


@constant_in_graphs
def _constant_plan(dim: int) -> BesselPlan:
    return _make_plan(dim)


@lru_cache(maxsize=256)
def _make_plan(dim: int) -> BesselPlan:
    """Compute the coefficients that :func:`bessel_plan` returns, once for each dimension."""
    lam = 0.5 * (dim - 1)
    shift = max(0, math.ceil(LEAST_LAMBDA - lam))
    # F and R as polynomials in t.
    ratio = np.zeros(3 * NUM_TERMS)
    integral = np.zeros(3 * NUM_TERMS)
    for k, (p, r) in enumerate(zip(*expansion_polynomials(), strict=True)):
        ratio[: len(p)] += np.array(p, dtype=float) / (lam + shift) ** k
        integral[: len(r)] += np.array(r, dtype=float) / (lam + shift) ** (k - 1)
    f = Polynomial(ratio)
    t = Polynomial([0.0, 1.0])
    g = f - (1.0 - t**2) * f.deriv()
    return BesselPlan(
        lam=lam,
        shifted_lam=lam + shift,
        rungs=tuple(range(dim + 2 * shift - 2, dim - 1, -2)),
        ratio=_economise(Polynomial(f.coef[2:])),
        slope=_economise(Polynomial(g.coef[1:])),
        curvature=_economise((2.0 + t) * g + t * (1.0 + t) * g.deriv()),
        integral=_economise(Polynomial(integral)),
    )


@lru_cache(maxsize=1)
def expansion_polynomials() -> tuple[list[np.ndarray], list[np.ndarray]]:
    r"""Return P_k and R_k for k = 0, 1, ..., as exact coefficients of powers of t, the lowest first.

    .. math::
        P_0 = 1, \quad P_k = -\tfrac12 \Big\{ t^2 [P_{k-1} - (1 - t^2) P_{k-1}']
            + (1 - t) \sum_{i=1}^{k-1} P_i P_{k-i} \Big\}, \quad
        (1 - t) R_k = \int_t^1 \frac{P_k(s)}{s^2 (1 + s)} ds \quad (k \ge 2).
    """
    exact_one = Fraction(1)
    one_minus_t, one_plus_t = np.array([exact_one, -exact_one]), np.array([exact_one, exact_one])
    p, r = [np.array([exact_one])], [np.array([0 * exact_one]), np.array([0 * exact_one])]
    for k in range(1, NUM_TERMS + 1):
        change = poly.polysub(
            p[-1], poly.polymul(poly.polymul(one_minus_t, one_plus_t), poly.polyder(p[-1]))
        )
        total = poly.polymul(np.array([0 * exact_one, 0 * exact_one, exact_one]), change)
        for i in range(1, k):
            total = poly.polyadd(total, poly.polymul(one_minus_t, poly.polymul(p[i], p[k - i])))
        p.append(-total / 2)
        if k >= 2:
            integrand = poly.polydiv(p[k][2:], one_plus_t)[0]
            antiderivative = poly.polyint(integrand)
            antiderivative[0] = -sum(antiderivative[1:])
            r.append(-poly.polydiv(antiderivative, one_minus_t)[0])
    return p, r


def _economise(series: Polynomial) -> tuple[float, ...]:
    """Return the shortest polynomial in x = 2t - 1 within the tolerance of ``series`` for t from 0 to 1."""
    chebyshev = series.convert(kind=Chebyshev, domain=[0.0, 1.0])
    dropped = np.cumsum(np.abs(chebyshev.coef[::-1])) < _SERIES_TOLERANCE
    short = chebyshev.truncate(max(2, len(dropped) - int(dropped.sum())))
    return tuple(short.convert(kind=Polynomial, domain=[0.0, 1.0]).coef[::-1].tolist())


class UniformVariables(NamedTuple):
    """Hold the variables of the uniform expansion; none is a difference of close numbers."""

    concentration: Tensor  # kappa
    lam: float  # lambda
    h: Tensor  # sqrt(kappa^2 + lambda^2)

    @property
    def t(self) -> Tensor:
        """Return the ratio lambda / h, from 1 at concentration 0 down to 0."""
        return self.lam / self.h

    @property
    def u(self) -> Tensor:
        """Return the ratio kappa / h."""
        return self.concentration / self.h

    @property
    def a0(self) -> Tensor:
        """Return the ratio kappa / (h + lambda), the leading term of the mean cosine."""
        return self.concentration / (self.h + self.lam)

    @property
    def one_minus_a0(self) -> Tensor:
        """Return 1 - a0."""
        t = self.t
        u = self.u
        return t * (1.0 + u + t) / ((1.0 + u) * (1.0 + t))

    @property
    def q(self) -> Tensor:
        """Return (h / lambda - 1) / 2."""
        return self.concentration * self.a0 / (2.0 * self.lam)


def uniform_variables(concentration: Tensor, lam: float) -> UniformVariables:
    """Return the variables of the uniform expansion for ``lam`` = (m - 1) / 2."""
    return UniformVariables(concentration, lam, (concentration.square() + lam * lam).sqrt())


def mean(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return A, by A_m = kappa / (m + kappa A_{m+2})."""
    result = _upper_mean(uniform_variables(concentration, plan.shifted_lam), plan)
    for rung in plan.rungs:
        result = concentration / (rung + concentration * result)
    return result


def complement(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return 1 - A, by 1 - A_m = sigma / (kappa + sigma) with sigma = m - kappa (1 - A_{m+2})."""
    result = _upper_complement(uniform_variables(concentration, plan.shifted_lam), plan)
    for rung in plan.rungs:
        sigma = rung - concentration * result
        result = sigma / (concentration + sigma)
    return result


def variance(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return A'."""
    if plan.rungs:
        *_, (total, _, delta, lam) = _descent(concentration, plan)
        return (lam + delta) / total.square()
    t = uniform_variables(concentration, plan.shifted_lam).t
    return t.square() / (plan.shifted_lam * (1.0 + t)) * (1.0 + t * _series(plan.slope, t))


def variance_slope(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return A'', in operations that can be differentiated once more."""
    v = uniform_variables(concentration, plan.shifted_lam)
    t = v.t
    lam = plan.shifted_lam
    result = -v.u * t**3 / (lam * (1.0 + t)).square() * _series(plan.curvature, t)
    first_derivative = t.square() / (lam * (1.0 + t)) * (1.0 + t * _series(plan.slope, t))
    for total, upper, delta, lam_here in _descent(concentration, plan):
        rise = lam_here + delta
        bend = concentration * (2.0 * first_derivative + concentration * result)
        result = (
            -(bend + 2.0 * rise * (upper + concentration * first_derivative) / total)
            / total.square()
        )
        first_derivative = rise / total.square()
    return result


def log_mean_exp(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return L, the log of the mean of exp(kappa w) under the uniform distribution."""
    upper = _upper_log_mean_exp(uniform_variables(concentration, plan.shifted_lam), plan)
    return upper + _log_growth(concentration, plan)


def peak(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return M = kappa - L."""
    upper = _upper_peak(uniform_variables(concentration, plan.shifted_lam), plan)
    return upper - _log_growth(concentration, plan)


def kl_to_uniform(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """Return U = kappa A - L."""
    return _kl_to_uniform(
        uniform_variables(concentration, plan.shifted_lam),
        mean(concentration, plan),
        complement(concentration, plan),
        _log_growth(concentration, plan),
        plan,
    )


def _kl_to_uniform(
    v: UniformVariables, cosine: Tensor, gap: Tensor, growth: Tensor | float, plan: BesselPlan
) -> Tensor:
    """Return U, given A, 1 - A and what the rungs add to L."""
    q = v.q
    t = v.t
    log_q = q.log1p()
    top = plan.shifted_lam * (log_q + 2.0 * q * _relative_excess(t, plan)) + _bounded_term(
        q, log_q, t, plan
    )
    if not plan.rungs:
        return top
    # Where A and the A of the dimension above are both near 1, their complements tell them apart.
    by_mean = cosine - _upper_mean(v, plan)
    by_complement = _upper_complement(v, plan) - gap
    rise = torch.where(v.concentration < 1.0, by_mean, by_complement)
    return top + v.concentration * rise - growth


def same_mean_kl(q: Tensor, p: Tensor, plan: BesselPlan) -> Tensor:
    r"""Return L(p) - L(q) - A(q) (p - q) for concentrations q and p of one shape.

    Within a factor e of each other it is :math:`\int_q^p (p - s) A'(s) ds`, all of one sign, by Gauss-Legendre in
    log s. Further apart nothing large cancels in the formula chosen for the size of both.
    """
    is_near = (p < math.e * q) & (q < math.e * p)
    log_ratio = torch.where(is_near, ((p - q) / torch.where(is_near, q, 1.0)).log1p(), 0.0)
    integral = by_chunks(partial(_rising_integral, plan=plan), (q, log_ratio), _INTEGRALS_AT_ONCE)
    # Both formulas share the walks down the rungs.
    v_q = uniform_variables(q, plan.shifted_lam)
    v_p = uniform_variables(p, plan.shifted_lam)
    growth_q = _log_growth(q, plan)
    growth_p = _log_growth(p, plan)
    cosine = mean(q, plan)
    gap = complement(q, plan)
    peaked = (
        (_upper_peak(v_q, plan) - growth_q) - (_upper_peak(v_p, plan) - growth_p) + gap * (p - q)
    )
    flat = (
        _kl_to_uniform(v_q, cosine, gap, growth_q, plan)
        + _upper_log_mean_exp(v_p, plan)
        + growth_p
        - p * cosine
    )
    return torch.where(
        is_near, log_ratio * integral, torch.where((q > plan.lam) & (p > plan.lam), peaked, flat)
    )


def _rising_integral(q: Tensor, log_ratio: Tensor, plan: BesselPlan) -> Tensor:
    """Return the mean of the integrand over log s from q to p."""
    s = q * torch.stack([node * log_ratio for node, _ in _GAUSS_LEGENDRE]).exp()
    p_over_s_less_1 = torch.stack([(1.0 - node) * log_ratio for node, _ in _GAUSS_LEGENDRE]).expm1()
    integrand = s.square() * p_over_s_less_1 * variance(s, plan)
    total = torch.zeros_like(q)
    for (_, weight), row in zip(_GAUSS_LEGENDRE, integrand.unbind(0), strict=True):
        total = total + weight * row
    return total


def _upper_log_mean_exp(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """Return L at dimension m + 2n."""
    q = v.q
    log_q = q.log1p()
    return plan.shifted_lam * (2.0 * q - log_q) - _bounded_term(q, log_q, v.t, plan)


def _upper_peak(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """Return M at dimension m + 2n."""
    lam = plan.shifted_lam
    q = v.q
    log_q = q.log1p()
    linear = v.concentration * lam * (1.0 + v.t / (1.0 + v.u)) / (v.h + lam)
    return linear + lam * log_q + _bounded_term(q, log_q, v.t, plan)


def _upper_mean(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """Return A at dimension m + 2n."""
    return v.a0 * (1.0 + _relative_excess(v.t, plan))


def _upper_complement(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """Return 1 - A at dimension m + 2n."""
    return v.one_minus_a0 - v.a0 * _relative_excess(v.t, plan)


def _relative_excess(t: Tensor, plan: BesselPlan) -> Tensor:
    """Return F - 1, the relative difference of the mean cosine from its leading term."""
    return t.square() * _series(plan.ratio, t)


def _bounded_term(q: Tensor, log_q: Tensor, t: Tensor, plan: BesselPlan) -> Tensor:
    """Return the term of -L that does not grow with the dimension; 2q / (1 + 2q) is 1 - t."""
    double = 2.0 * q
    return 0.5 * (double.log1p() - log_q) - double / (1.0 + double) * _series(plan.integral, t)


def _log_growth(concentration: Tensor, plan: BesselPlan) -> Tensor | float:
    """Return what the rungs add to L: the logs of 1 + kappa A_{b+2} / b."""
    if not plan.rungs:
        return 0.0
    upper = _upper_mean(uniform_variables(concentration, plan.shifted_lam), plan)
    total, product = torch.zeros_like(upper), torch.zeros_like(upper)
    for index, rung in enumerate(plan.rungs):
        growth = concentration * upper / rung
        product = product + growth + product * growth
        upper = concentration / (rung * (1.0 + growth))
        if index % _GROUP == _GROUP - 1:
            total, product = total + product.log1p(), torch.zeros_like(upper)
    return total + product.log1p()


def _descent(
    concentration: Tensor, plan: BesselPlan
) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    r"""Yield at each rung b :math:`b + \kappa A_{b+2}`, :math:`A_{b+2}`, delta and (b-1)/2.

    The last two sum to :math:`b - \kappa^2 A_{b+2}'`: delta is :math:`(b+1)/2 - \kappa^2 A_{b+2}'`, which has a
    recurrence that does not cancel.
    """
    v = uniform_variables(concentration, plan.shifted_lam)
    slope = _series(plan.slope, v.t)
    cosine, gap = _upper_mean(v, plan), _upper_complement(v, plan)
    delta = plan.shifted_lam * v.t * (1.0 + v.t * slope - slope)
    for rung in plan.rungs:
        lam, sigma = 0.5 * (rung - 1), rung - concentration * gap
        total = concentration + sigma
        yield total, cosine, delta, lam
        inverse = total.reciprocal()
        cosine, gap = concentration * inverse, sigma * inverse
        delta = torch.addcmul(
            lam * torch.addcmul(gap, gap, cosine), cosine, cosine * delta, value=-1.0
        )


def _series(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """Return the polynomial in 2t - 1 with these coefficients, the highest power first, by Horner's rule."""
    x = 2.0 * t - 1.0
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value
