# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The distribution of one element of a radial normal vector, as plain numbers that depend on the dimension alone."""

import math
from collections.abc import Callable
from functools import lru_cache

from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.special import betainc, erf, erfc

# Beyond this the half-normal has no mass left in float64.
_LARGEST_RADIUS = 40.0
# The smallest probability with a quantile below that, by a margin.
_LEAST = 1e-300


def radial_marginal_mass(half_width: float, dim: int) -> float:
    r"""Return P(\|u_1 r\| <= half_width) for u uniform on the unit sphere of R^n and r standard half-normal.

    Given r, u_1^2 is Beta(1/2, (n-1)/2), so the mass is one integral over the radius.
    """
    mass_of_small_radii = float(erf(half_width / math.sqrt(2.0)))
    if dim == 1:
        return mass_of_small_radii
    return mass_of_small_radii + _over_radii(
        half_width,
        dim,
        lambda squared_ratio: betainc(0.5, 0.5 * (dim - 1), squared_ratio),
        1e-13,
        1e-11,
    )


def radial_marginal_tail(half_width: float, dim: int) -> float:
    """Return one minus the mass, with all digits also where the mass rounds to one."""
    if dim == 1:
        return float(erfc(half_width / math.sqrt(2.0)))
    return _over_radii(
        half_width,
        dim,
        lambda squared_ratio: betainc(0.5 * (dim - 1), 0.5, -math.expm1(math.log(squared_ratio))),
        0.0,
        1e-9,
    )


def _over_radii(
    half_width: float,
    dim: int,
    function: Callable[[float], float],
    absolute: float,
    relative: float,
) -> float:
    """Integrate a function of the squared ratio of half width to radius over all radii above the half width."""

    def integrand(log_radius: float) -> float:
        radius = math.exp(log_radius)
        density = math.sqrt(2.0 / math.pi) * math.exp(-0.5 * radius * radius) * radius
        return density * float(function(min((half_width / radius) ** 2, 1.0)))

    low, high = math.log(half_width), math.log(_LARGEST_RADIUS)
    # The integrand turns at the bulk of the Beta distribution, r ~ half_width sqrt(n), at that of the half-normal, r ~
    # 1, and at the largest radius of a small tail.
    turns = {low + 0.5 * math.log(dim), 0.0, low + 0.5 * math.log1p(dim / (1.0 + half_width**2))}
    points = sorted(min(max(turn, low), high) for turn in turns)
    return float(
        quad(
            integrand,
            low,
            high,
            points=points,
            limit=400,
            epsabs=absolute,
            epsrel=relative,
            full_output=1,
        )[0]
    )


@lru_cache(maxsize=4096)
def radial_marginal_quantile(probability: float, dim: int) -> float:
    r"""Return a quantile of one coordinate u_1 r of the standard radial distribution in :math:`R^n`.

    For n = 1 this is the normal quantile; for larger n the marginal is narrower (variance 1/n) and has heavier tails
    (kurtosis 9n/(n+2)).
    """
    if not _LEAST <= probability < 1.0:
        raise ValueError(
            f"probabilities must be between {_LEAST:g} and 1, both excluded, got {probability!r}"
        )
    if probability == 0.5:
        return 0.0
    # Twice the smaller side is the mass outside of the quantile and its mirror image.
    tail = 2.0 * min(probability, 1.0 - probability)

    def excess(log_half_width: float) -> float:
        half_width = math.exp(log_half_width)
        if tail > 1e-3:
            return radial_marginal_mass(half_width, dim) - abs(2.0 * probability - 1.0)
        return math.log(tail) - math.log(max(radial_marginal_tail(half_width, dim), _LEAST))

    # A standard deviation has more than a tenth of the mass outside.
    least = 1e-150 if tail > 1e-3 else dim**-0.5
    log_half_width = brentq(excess, math.log(least), math.log(0.99 * _LARGEST_RADIUS), xtol=1e-12)
    return math.copysign(math.exp(log_half_width), probability - 0.5)
