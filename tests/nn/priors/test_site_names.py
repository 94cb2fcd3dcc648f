# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The names that other packages read are those of the sites that the prior makes."""

import pyro.poutine as poutine
import pytest
import torch

from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.nn.priors.site_names import TensorSites


@pytest.mark.parametrize(
    ("grouping", "sides"), [("row", ["row"]), ("column", ["column"]), ("double", ["row", "column"])]
)
def test_the_names_are_those_of_the_prior(grouping, sides):
    trace = poutine.trace(RadialDirectionalPrior(grouping).sample_parameter).get_trace("0.weight", torch.randn(3, 2))
    sites = TensorSites("0.weight")
    radii = [sites.global_radius, *(sites.local_radius(side) for side in sides)]
    factors = {name for radius in radii for name in (radius.gamma, radius.inverse_gamma)}
    assert set(trace.stochastic_nodes) == factors | {sites.direction(side) for side in sides}
    assert set(trace.observation_nodes) == {radius.radius for radius in radii}


def test_the_parameter_is_found_by_the_gamma_factor_of_its_global_radius():
    sites = TensorSites("0.weight")
    assert TensorSites.with_global_radius(sites.global_radius.gamma) == sites
    local = sites.local_radius("row")
    for other in ("0.weight", sites.global_radius.radius, sites.global_radius.inverse_gamma, local.gamma):
        assert TensorSites.with_global_radius(other) is None
