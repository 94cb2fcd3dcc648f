# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0


import pytest
import torch
from scipy import stats

from pyro_radial.distributions.radial_marginal import radial_marginal_mass, radial_marginal_quantile


def test_in_one_dimension_the_marginal_is_normal():
    for probability in (1e-6, 0.1, 0.5, 0.9, 0.999):
        assert radial_marginal_quantile(probability, 1) == pytest.approx(stats.norm.ppf(probability), abs=1e-9)


def test_in_three_dimensions_the_marginal_mass_is_the_closed_form():
    # There u_1 is uniform on [-1, 1], so P(|u_1 r| <= t) = E min(1, t / r).
    for half_width in (1e-3, 0.1, 0.7, 2.0):
        mass_of_small_radii = stats.halfnorm.cdf(half_width)
        tail = stats.halfnorm.expect(lambda r, t=half_width: t / r, lb=half_width)
        assert radial_marginal_mass(half_width, 3) == pytest.approx(mass_of_small_radii + tail, abs=1e-8)


@pytest.mark.parametrize("dim", [1, 2, 17, 10**7])
def test_quantile_inverts_the_mass_and_is_odd(dim):
    for probability in (0.5 + 1e-6, 0.6, 0.9, 1 - 1e-6):
        quantile = radial_marginal_quantile(probability, dim)
        assert radial_marginal_mass(quantile, dim) == pytest.approx(2 * probability - 1, abs=1e-9)
        assert radial_marginal_quantile(1 - probability, dim) == pytest.approx(-quantile, rel=1e-6)


def test_the_median_is_zero_and_torch_is_not_needed():
    assert radial_marginal_quantile(0.5, 10) == 0.0
    assert not isinstance(radial_marginal_quantile(0.7, 10), torch.Tensor)
