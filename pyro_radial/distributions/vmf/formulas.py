# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The scalars of the von Mises-Fisher distribution as elementwise formulas, without a derivative of their own."""

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_radial.distributions.chunks import by_chunks
from pyro_radial.distributions.vmf.bessel_expansion import BesselPlan

__all__ = [
    "UniformVariables",
    "complement",
    "kl_to_uniform",
    "log_mean_exp",
    "mean",
    "peak",
    "same_mean_kl",
    "uniform_variables",
    "variance",
    "variance_slope",
]

# Nodes and weights on (0, 1): 10 points give the integral over a factor of e to 5e-15.
_GAUSS_LEGENDRE = [(0.5 * (1.0 + x), 0.5 * w) for x, w in zip(*np.polynomial.legendre.leggauss(10), strict=True)]
# Elements at a time, each of which has so many points.
_CHUNK = 2**10
# How many growth factors are multiplied before a logarithm is taken: fewer logarithms, and no overflow in float32.
_GROUP = 4


class UniformVariables(NamedTuple):
    r"""The variables of the expansion that is uniform in the concentration: none is a difference of close numbers.

    Each is the uniform expansion at dimension m + 2n, in variables none of which is a difference, and then n steps of a
    recurrence whose terms have one sign. So each result is good to a few roundings of its own size, in float32 too. The
    derivatives are other formulas of this module; :mod:`~pyro_radial.distributions.special` ties them together.
    """

    concentration: Tensor  # kappa
    lam: float  # lambda
    h: Tensor  # sqrt(kappa^2 + lambda^2)

    @property
    def t(self) -> Tensor:
        """The ratio lambda / h, from 1 at concentration 0 down to 0."""
        return self.lam / self.h

    @property
    def u(self) -> Tensor:
        """The ratio kappa / h."""
        return self.concentration / self.h

    @property
    def a0(self) -> Tensor:
        """The ratio kappa / (h + lambda), the leading term of the mean cosine."""
        return self.concentration / (self.h + self.lam)

    @property
    def one_minus_a0(self) -> Tensor:
        """1 - a0."""
        t, u = self.t, self.u
        return t * (1.0 + u + t) / ((1.0 + u) * (1.0 + t))

    @property
    def q(self) -> Tensor:
        """(h / lambda - 1) / 2."""
        return self.concentration * self.a0 / (2.0 * self.lam)


def uniform_variables(concentration: Tensor, lam: float) -> UniformVariables:
    """The variables of the uniform expansion, for ``lam`` = (m - 1) / 2."""
    return UniformVariables(concentration, lam, (concentration.square() + lam * lam).sqrt())


def mean(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """A, by A_m = kappa / (m + kappa A_{m+2})."""
    result = _upper_mean(uniform_variables(concentration, plan.shifted_lam), plan)
    for rung in plan.rungs:
        result = concentration / (rung + concentration * result)
    return result


def complement(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """1 - A, by 1 - A_m = sigma / (kappa + sigma) with sigma = m - kappa (1 - A_{m+2})."""
    result = _upper_complement(uniform_variables(concentration, plan.shifted_lam), plan)
    for rung in plan.rungs:
        sigma = rung - concentration * result
        result = sigma / (concentration + sigma)
    return result


def variance(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """A'."""
    t = uniform_variables(concentration, plan.shifted_lam).t
    result = t.square() / (plan.shifted_lam * (1.0 + t)) * (1.0 + t * _series(plan.slope, t))
    # The last rung's alone.
    last = deque(_descent(concentration, plan), maxlen=1)
    if last:
        total, _, delta, lam = last[0]
        result = (lam + delta) / total.square()
    return result


def variance_slope(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """A'', as operations that can be differentiated once more."""
    v = uniform_variables(concentration, plan.shifted_lam)
    t, lam = v.t, plan.shifted_lam
    result = -v.u * t**3 / (lam * (1.0 + t)).square() * _series(plan.curvature, t)
    first = t.square() / (lam * (1.0 + t)) * (1.0 + t * _series(plan.slope, t))
    for total, upper, delta, lam_here in _descent(concentration, plan):
        rise = lam_here + delta
        bend = concentration * (2.0 * first + concentration * result)
        result = -(bend + 2.0 * rise * (upper + concentration * first) / total) / total.square()
        first = rise / total.square()
    return result


def log_mean_exp(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """L."""
    return _upper_log_mean_exp(uniform_variables(concentration, plan.shifted_lam), plan) + _log_growth(
        concentration, plan
    )


def peak(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """M, which is kappa - L."""
    return _upper_peak(uniform_variables(concentration, plan.shifted_lam), plan) - _log_growth(concentration, plan)


def kl_to_uniform(concentration: Tensor, plan: BesselPlan) -> Tensor:
    """U, which is kappa A - L."""
    v = uniform_variables(concentration, plan.shifted_lam)
    cosine, gap = mean(concentration, plan), complement(concentration, plan)
    return _kl_to_uniform(v, cosine, gap, _log_growth(concentration, plan), plan)


def _kl_to_uniform(
    v: UniformVariables, cosine: Tensor, gap: Tensor, growth: Tensor | float, plan: BesselPlan
) -> Tensor:
    """U from A, 1 - A and what the rungs add to L."""
    q, t = v.q, v.t
    log_q = q.log1p()
    top = plan.shifted_lam * (log_q + 2.0 * q * _excess(t, plan)) + _rest(q, log_q, t, plan)
    if not plan.rungs:
        return top
    # Where A and the A of the dimension above are both near 1, their complements tell them apart.
    by_mean, by_complement = cosine - _upper_mean(v, plan), _upper_complement(v, plan) - gap
    rise = torch.where(v.concentration < 1.0, by_mean, by_complement)
    return top + v.concentration * rise - growth


def same_mean_kl(q: Tensor, p: Tensor, plan: BesselPlan) -> Tensor:
    r"""L(p) - L(q) - A(q) (p - q), for concentrations q and p of one shape.

    Within a factor e of each other it is :math:`\int_q^p (p - s) A'(s) ds`, all of one sign, by Gauss-Legendre in
    log s. Further apart no large part is left to cancel once the formula suits the size of both.
    """
    near = (p < math.e * q) & (q < math.e * p)
    log_ratio = torch.where(near, ((p - q) / torch.where(near, q, 1.0)).log1p(), 0.0)
    integral = by_chunks(partial(_rising_integral, plan=plan), (q, log_ratio), _CHUNK)
    # Both formulas share the walks down the rungs.
    v_q, v_p = (uniform_variables(side, plan.shifted_lam) for side in (q, p))
    growth_q, growth_p = _log_growth(q, plan), _log_growth(p, plan)
    cosine, gap = mean(q, plan), complement(q, plan)
    peaked = (_upper_peak(v_q, plan) - growth_q) - (_upper_peak(v_p, plan) - growth_p) + gap * (p - q)
    flat = _kl_to_uniform(v_q, cosine, gap, growth_q, plan) + _upper_log_mean_exp(v_p, plan) + growth_p - p * cosine
    return torch.where(near, log_ratio * integral, torch.where((q > plan.lam) & (p > plan.lam), peaked, flat))


def _rising_integral(q: Tensor, log_ratio: Tensor, plan: BesselPlan) -> Tensor:
    """The integral over log s from q to p, over the length of that."""
    s = q * torch.stack([node * log_ratio for node, _ in _GAUSS_LEGENDRE]).exp()
    p_over_s_less_1 = torch.stack([(1.0 - node) * log_ratio for node, _ in _GAUSS_LEGENDRE]).expm1()
    integrand = s.square() * p_over_s_less_1 * variance(s, plan)
    total = torch.zeros_like(q)
    for (_, weight), row in zip(_GAUSS_LEGENDRE, integrand.unbind(0), strict=True):
        total = total + weight * row
    return total


def _upper_log_mean_exp(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """L at dimension m + 2n."""
    q = v.q
    log_q = q.log1p()
    return plan.shifted_lam * (2.0 * q - log_q) - _rest(q, log_q, v.t, plan)


def _upper_peak(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """M at dimension m + 2n."""
    lam, q = plan.shifted_lam, v.q
    log_q = q.log1p()
    linear = v.concentration * lam * (1.0 + v.t / (1.0 + v.u)) / (v.h + lam)
    return linear + lam * log_q + _rest(q, log_q, v.t, plan)


def _upper_mean(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """A at dimension m + 2n."""
    return v.a0 * (1.0 + _excess(v.t, plan))


def _upper_complement(v: UniformVariables, plan: BesselPlan) -> Tensor:
    """1 - A at dimension m + 2n."""
    return v.one_minus_a0 - v.a0 * _excess(v.t, plan)


def _excess(t: Tensor, plan: BesselPlan) -> Tensor:
    """F - 1: by how much the mean cosine differs from its leading term, relative to it."""
    return t.square() * _series(plan.ratio, t)


def _rest(q: Tensor, log_q: Tensor, t: Tensor, plan: BesselPlan) -> Tensor:
    """The part of -L that does not grow with the dimension; 2q / (1 + 2q) is 1 - t."""
    double = 2.0 * q
    return 0.5 * (double.log1p() - log_q) - double / (1.0 + double) * _series(plan.integral, t)


def _log_growth(concentration: Tensor, plan: BesselPlan) -> Tensor | float:
    """What the rungs add to L: the logs of 1 + kappa A_{b+2} / b."""
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


def _descent(concentration: Tensor, plan: BesselPlan) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    r"""At each rung b: :math:`b + \kappa A_{b+2}`, :math:`A_{b+2}`, and :math:`b - \kappa^2 A_{b+2}'` as two summands.

    They are delta = (b+1)/2 - kappa^2 A_{b+2}', which has a recurrence that does not cancel, and (b-1)/2.
    """
    if not plan.rungs:
        return
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
        delta = torch.addcmul(lam * torch.addcmul(gap, gap, cosine), cosine, cosine * delta, value=-1.0)


def _series(coefficients: tuple[float, ...], t: Tensor) -> Tensor:
    """The polynomial in 2t - 1 with these coefficients, the highest power first, by Horner's rule."""
    x = 2.0 * t - 1.0
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value
