# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest

from pyro_radial.distributions.vmf.bessel import LEAST_LAMBDA, bessel_plan


@pytest.mark.parametrize("dim", [2, 3, 40, 41, 42, 500])
def test_small_dimensions_climb_to_where_the_expansion_holds(dim):
    plan = bessel_plan(dim)
    assert plan.lam == (dim - 1) / 2
    assert plan.shifted_lam == plan.lam + len(plan.rungs)
    assert plan.shifted_lam >= LEAST_LAMBDA
    assert not plan.rungs or plan.shifted_lam < LEAST_LAMBDA + 1
    assert plan.rungs == tuple(dim + 2 * k for k in reversed(range(len(plan.rungs))))
