# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from pyro_radial.distributions.radial_marginal import radial_marginal_mass, radial_marginal_quantile


@pytest.mark.parametrize("dim", [1, 2, 17, 10**7])
def test_quantile_inverts_the_mass_and_is_odd(dim):
    for probability in (0.5 + 1e-6, 0.6, 0.9, 1 - 1e-6):
        quantile = radial_marginal_quantile(probability, dim)
        assert radial_marginal_mass(quantile, dim) == pytest.approx(2 * probability - 1, abs=1e-9)
        assert radial_marginal_quantile(1 - probability, dim) == pytest.approx(-quantile, rel=1e-6)


def test_the_median_is_zero_and_torch_is_not_needed():
    assert radial_marginal_quantile(0.5, 10) == 0.0
    assert not isinstance(radial_marginal_quantile(0.7, 10), torch.Tensor)
