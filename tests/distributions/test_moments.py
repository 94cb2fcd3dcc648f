# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro.distributions as dist
import pytest
import torch

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.moments import match_moments
from pyro_radial.distributions.wrappers import leaf

LOC, SCALE = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, 1.0]]), torch.tensor([[0.1, 1.0, 2.0], [0.3, 0.2, 1.0]])
COVARIANCE = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
REAL = {
    "radial": RadialNormal(LOC, SCALE, 2),
    "multivariate": dist.MultivariateNormal(torch.ones(2), COVARIANCE),
    "student": dist.StudentT(5.0, LOC, SCALE).to_event(2),
    "laplace": dist.Laplace(LOC, SCALE).to_event(1),
}


@pytest.mark.parametrize("distribution", REAL.values(), ids=REAL.keys())
def test_a_real_distribution_keeps_shape_mean_and_variance(distribution):
    normal = match_moments(distribution)
    assert type(leaf(normal)) is dist.Normal
    assert (normal.batch_shape, normal.event_shape) == (distribution.batch_shape, distribution.event_shape)
    torch.testing.assert_close(normal.mean, distribution.mean)
    torch.testing.assert_close(normal.variance, distribution.variance)


def test_normals_and_log_normals_are_themselves():
    for distribution in (
        dist.Normal(LOC, SCALE).to_event(2),
        dist.LogNormal(LOC, SCALE).to_event(1),
        dist.LogNormal(0.0, 1.0),
    ):
        assert match_moments(distribution) is distribution


def test_what_has_no_such_normal_is_refused():
    for distribution in (dist.Gamma(2.0, 1.0), dist.Dirichlet(torch.ones(3)), dist.Uniform(LOC, LOC + 1).to_event(1)):
        with pytest.raises(ValueError, match=f"{type(leaf(distribution)).__name__} cannot be matched by a normal"):
            match_moments(distribution)
    for distribution in (dist.Cauchy(0.0, 1.0), dist.StudentT(2.0, LOC, SCALE).to_event(2)):
        with pytest.raises(ValueError, match=f"{type(leaf(distribution)).__name__} has no finite mean and variance"):
            match_moments(distribution)
