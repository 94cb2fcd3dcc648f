# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The distribution of one element of a radial normal vector: plain numbers that depend on the dimension alone."""

import math
from functools import lru_cache

from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import betainc, erf

__all__ = ["radial_marginal_mass", "radial_marginal_quantile"]

# Beyond this the half-normal has no mass left in float64.
_FAR = 40.0


def radial_marginal_mass(half_width: float, dim: int) -> float:
    r"""P(\|u_1 r\| <= half_width) for u uniform on the unit sphere of R^n and r standard half-normal.

    Given r, u_1^2 is Beta(1/2, (n-1)/2), so the mass is one integral over the radius.
    """
    if dim == 1:
        return float(erf(half_width / math.sqrt(2.0)))

    def integrand(log_radius: float) -> float:
        radius = math.exp(log_radius)
        density = math.sqrt(2.0 / math.pi) * math.exp(-0.5 * radius * radius) * radius
        return density * float(betainc(0.5, 0.5 * (dim - 1), (half_width / radius) ** 2))

    low, high = math.log(half_width), math.log(_FAR)
    # The integrand turns where the Beta distribution's bulk, r ~ half_width sqrt(n), or the half-normal's, r ~ 1, lies.
    turns = sorted({min(max(low + 0.5 * math.log(dim), low), high), min(max(0.0, low), high)})
    outside = quad(integrand, low, high, points=turns, limit=400, epsabs=1e-13, epsrel=1e-11)[0]
    return float(erf(half_width / math.sqrt(2.0))) + outside


@lru_cache(maxsize=4096)
def radial_marginal_quantile(probability: float, dim: int) -> float:
    r"""Quantile of one coordinate u_1 r of the standard radial distribution in :math:`R^n`.

    :param float probability: in (0, 1).
    :param int dim: n, the number of elements of one event.

    For n = 1 this is the normal quantile; for larger n the marginal is narrower (variance 1/n) and heavier
    tailed (kurtosis 9n/(n+2)).

    >>> round(radial_marginal_quantile(0.975, 1), 4)
    1.96
    """
    mass = abs(2.0 * probability - 1.0)
    if mass == 0.0:
        return 0.0
    log_half_width = brentq(
        lambda s: radial_marginal_mass(math.exp(s), dim) - mass, math.log(1e-150), math.log(0.99 * _FAR), xtol=1e-12
    )
    return math.copysign(math.exp(log_half_width), probability - 0.5)
