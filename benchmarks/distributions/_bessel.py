# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Ratios and logarithms of Bessel functions I, as Oh, Adamczewski and Park (2019) approximate them, and in truth."""

import math
from itertools import count
from typing import Any

import mpmath as mp
import numpy as np
from scipy.special import gammaln, ive

BOUNDS = ("theorem 1", "theorem 2")
DIGITS = 40


@mp.workdps(DIGITS)
def truth(concentration: float, dim: int) -> tuple[Any, Any]:
    """L = log 0F1(; m/2; kappa^2 / 4) and its derivative A, by the series of 0F1 from its largest term outwards."""
    kappa, nu = mp.mpf(concentration), mp.mpf(dim) / 2 - 1
    x = kappa**2 / 4
    peak = int(mp.floor((mp.sqrt(nu**2 + 4 * x) - nu) / 2))
    total, moment = mp.mpf(1), mp.mpf(peak)
    for indices, step in ((count(peak + 1), 1), (range(peak, 0, -1), -1)):
        term = mp.mpf(1)
        for k in indices:
            ratio = x / (k * (nu + k))
            term = term * ratio if step == 1 else term / ratio
            total += term
            moment += term * (k if step == 1 else k - 1)
            if term < mp.eps * total / 100:
                break
    largest = peak * mp.log(x) - mp.loggamma(peak + 1) - mp.loggamma(nu + peak + 1) + mp.loggamma(nu + 1)
    # d/dkappa of kappa^(2k) is 2k / kappa times it.
    return largest + mp.log(total), 2 / kappa * moment / total


def bounds(theorem: str, nu: Any, z: Any) -> tuple[Any, Any]:
    """Lower and upper bound on I_nu(z) / I_(nu-1)(z), in the arithmetic of ``z``.

    Theorem 1 is theorem 3 of their supplement; the mean of the two bounds is what they take for the ratio.
    """
    if theorem == "theorem 2":
        lower = z / (nu - 0.5 + ((nu + 0.5) ** 2 + z**2) ** 0.5)
        return lower, z / (nu - 1 + ((nu + 1) ** 2 + z**2) ** 0.5)
    both = []
    for alpha in (2, 0):
        lam = nu + (alpha - 1) / 2
        delta = nu - 0.5 + lam / (2 * (lam**2 + z**2) ** 0.5)
        both.append(z / (delta + (delta**2 + z**2) ** 0.5))
    return both[0], both[1]


def log_bessel_piecewise(nu: float, z: np.ndarray, printed: bool) -> np.ndarray:
    """Eq. 44 as printed, or with the mean of the two exponents of eq. 38 and the switch of the published code."""
    eta = (nu + (0.5 if printed else 1.5)) / (2 * (nu + 1))
    low = nu * np.log(z) + eta * z - (eta + nu) * math.log(2.0) - gammaln(nu + 1)
    return np.where(z < (nu if printed else 2 * nu), low, z - 0.5 * np.log(2 * math.pi * z))


def log_bessel_series(nu: float, z: np.ndarray) -> np.ndarray:
    """Eq. 45, with the mean of the bounds of theorem 1 for each ratio."""
    base = nu - math.floor(nu)
    orders = base + np.arange(1, math.floor(nu) + 1)[:, None]
    return np.log(ive(base, z)) + z + np.log(sum(bounds("theorem 1", orders, z)) / 2).sum(0)


@mp.workdps(DIGITS)
def distance(value: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The distance in exact arithmetic, NaN where ``value`` is not finite."""
    finite = np.isfinite(value.astype(float))
    return np.where(finite, abs(np.where(finite, value, 0) - exact).astype(float), np.nan)
