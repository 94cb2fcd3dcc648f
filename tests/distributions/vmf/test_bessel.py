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
