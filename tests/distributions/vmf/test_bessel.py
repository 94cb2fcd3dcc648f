# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from fractions import Fraction

import numpy as np
import pytest
from numpy.polynomial import polynomial as poly

from pyro_radial.distributions.vmf.bessel import (
    LEAST_LAMBDA,
    NUM_TERMS,
    bessel_plan,
    expansion_polynomials,
)

HALF, ZERO, ONE = Fraction(1, 2), Fraction(0), Fraction(1)


def at(coefficients, t):
    """A polynomial at a fraction, exactly."""
    return sum((c * t**k for k, c in enumerate(coefficients)), ZERO)


def test_the_first_terms_are_those_derived_by_hand():
    p, r = expansion_polynomials()
    assert p[0].tolist() == [1]
    assert p[1].tolist() == [0, 0, -HALF]
    assert p[2].tolist() == [0, 0, 0, -HALF, Fraction(1, 8), Fraction(5, 8)]
    assert r[2].tolist() == [Fraction(-1, 24), Fraction(-1, 24), Fraction(5, 24)]


def test_the_terms_solve_the_riccati_equation_order_by_order():
    # A' = 1 - A^2 - 2 lambda A / kappa for A = a_0 F, with a_0^2 = (1-t)/(1+t) and d/dkappa = -(t^2 u / lambda) d/dt,
    # is t^2 [F - (1-t^2) F'] / lambda = (1+t) (1 - a_0^2 F^2) - 2 t F, here in powers of 1 / lambda.
    p, _ = expansion_polynomials()
    one_minus_t, one_plus_t = [ONE, -ONE], [ONE, ONE]
    for k in range(NUM_TERMS + 1):
        change = np.array([ZERO])
        if k > 0:
            slope = poly.polymul([ONE, ZERO, -ONE], poly.polyder(p[k - 1]))
            change = poly.polymul([ZERO, ZERO, ONE], poly.polysub(p[k - 1], slope))
        square = poly.polymul(one_minus_t, sum_of(poly.polymul(p[i], p[k - i]) for i in range(k + 1)))
        right = poly.polysub(np.array(one_plus_t) if k == 0 else np.array([ZERO]), square)
        right = poly.polysub(right, poly.polymul([ZERO, 2 * ONE], p[k]))
        assert not any(poly.polysub(change, right))


def test_the_second_polynomials_are_the_integrals_of_the_first():
    p, r = expansion_polynomials()
    for first, second in zip(p[2:], r[2:], strict=True):
        slope = poly.polyder(poly.polymul([ONE, -ONE], second))
        left = poly.polymul(slope, poly.polymul([ZERO, ZERO, ONE], [ONE, ONE]))
        assert not any(poly.polyadd(left, first))


@pytest.mark.parametrize("dim", [2, 41, 100, 784, 10**5])
def test_a_plan_holds_the_series_within_the_rounding_of_float64(dim):
    plan = bessel_plan(dim)
    lam = Fraction(dim - 1, 2) + len(plan.rungs)
    p, r = expansion_polynomials()
    f = sum_of(term / lam**k for k, term in enumerate(p))
    g = poly.polysub(f, poly.polymul([ONE, ZERO, -ONE], poly.polyder(f)))
    h = poly.polyadd(poly.polymul([2 * ONE, ONE], g), poly.polymul([ZERO, ONE, ONE], poly.polyder(g)))
    integral = sum_of(term / lam ** (k - 1) for k, term in enumerate(r))
    for t in (Fraction(k, 16) for k in range(1, 17)):
        assert value(plan.ratio, t) == pytest.approx(float((at(f, t) - 1) / t**2), abs=3e-17)
        assert value(plan.slope, t) == pytest.approx(float((at(g, t) - 1) / t), abs=1e-16)
        assert value(plan.curvature, t) == pytest.approx(float(at(h, t)), abs=2e-15)
        assert value(plan.integral, t) == pytest.approx(float(at(integral, t)), abs=3e-17)


@pytest.mark.parametrize("dim", [2, 3, 40, 41, 42, 500])
def test_small_dimensions_climb_to_where_the_expansion_holds(dim):
    plan = bessel_plan(dim)
    assert plan.lam == (dim - 1) / 2
    assert plan.shifted_lam == plan.lam + len(plan.rungs)
    assert plan.shifted_lam >= LEAST_LAMBDA
    assert not plan.rungs or plan.shifted_lam < LEAST_LAMBDA + 1
    assert plan.rungs == tuple(dim + 2 * k for k in reversed(range(len(plan.rungs))))


def sum_of(series):
    total = np.array([ZERO])
    for coefficients in series:
        total = poly.polyadd(total, coefficients)
    return total


def value(coefficients, t):
    """The plan's polynomial in 2t - 1, the highest power first."""
    return float(np.polyval(coefficients, float(2 * t - 1)))
