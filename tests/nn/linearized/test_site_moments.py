# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Means and covariances of the distributions that sites have."""

import pyro.distributions as dist
import pytest
import torch

from pyro_radial.distributions import RadialNormal
from pyro_radial.nn.linearized.site_moments import moments_of_site, site_moments

LOC, SCALE = torch.randn(2, 3), 0.5 + torch.rand(2, 3)


@pytest.mark.parametrize(
    ("distribution", "variance"),
    [
        (dist.Normal(LOC, SCALE).to_event(2), SCALE.square()),
        (dist.Normal(LOC, 0.5).to_event(1), torch.full((2, 3), 0.25)),
        (RadialNormal(LOC, SCALE, event_dim=2), SCALE.square() / 6),
        (RadialNormal(LOC, SCALE, event_dim=1).to_event(1), SCALE.square() / 3),
        (dist.Normal(LOC, SCALE).to_event(2).mask(False), SCALE.square()),
        (dist.Delta(LOC, event_dim=2), torch.zeros(2, 3)),
    ],
)
def test_variances_are_those_of_the_elements(distribution, variance):
    mean, block = moments_of_site("w", distribution)
    torch.testing.assert_close(mean, LOC)
    torch.testing.assert_close(block.covariance, variance)
    assert block.sites == ("w",)
    assert not block.is_full


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: d.to_event(1), lambda d: d.mask(True).to_event(1)])
def test_a_full_covariance_is_kept_for_each_of_a_batch(wrap):
    root = torch.randn(3, 3)
    covariance = root @ root.mT + torch.eye(3)
    mean, block = moments_of_site("w", wrap(dist.MultivariateNormal(LOC, covariance)))
    torch.testing.assert_close(mean, LOC)
    torch.testing.assert_close(block.covariance, covariance.expand(2, 3, 3))
    assert block.is_full
    jacobian = torch.randn(4, 6)
    expected = jacobian @ torch.block_diag(covariance, covariance)
    torch.testing.assert_close(block.times(jacobian), expected)


@pytest.mark.parametrize("batch", [(), (1,), (2,)])
def test_a_low_rank_covariance_keeps_its_factor_unless_there_are_several(batch):
    q = dist.LowRankMultivariateNormal(torch.zeros(*batch, 3), torch.randn(*batch, 3, 2), 1.0 + torch.rand(*batch, 3))
    mean, block = moments_of_site("w", q)
    assert block.is_full == (batch == (2,))
    assert (block.factor is None) == block.is_full
    jacobian = torch.randn(4, mean.numel())
    covariance = torch.block_diag(*q.covariance_matrix.reshape(-1, 3, 3))
    torch.testing.assert_close(block.times(jacobian), jacobian @ covariance)


def test_what_has_no_variance_in_closed_form_has_no_moments():
    assert moments_of_site("w", dist.TransformedDistribution(dist.Normal(LOC, SCALE), [])) is None


def test_a_point_beside_others_has_no_variance():
    mean, blocks = site_moments({"w": dist.Normal(LOC, SCALE), "b": dist.Delta(LOC)}, {"w": LOC.shape, "b": LOC.shape})
    assert sorted(mean) == ["b", "w"]
    assert [bool(block.covariance.any()) for block in blocks] == [True, False]
