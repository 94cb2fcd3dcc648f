# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.logarithmic_pool import LogarithmicPool

WEIGHTS = [0.6, 0.3, 0.1]


def normal(loc, scale, size=3):
    return dist.Normal(torch.full((size,), loc), torch.full((size,), scale)).to_event(1)


def radial(loc, scale, size=3):
    return RadialNormal(torch.linspace(loc, loc + 1.0, size), torch.full((size,), scale))


def test_a_kl_exceeds_that_to_the_normalized_pool_by_the_log_of_its_constant():
    """By quadrature on a line, where the geometric mean of normals is a normal up to a constant of at most one."""
    members = [dist.Normal(-1.0, 0.5), dist.Normal(1.5, 2.0), dist.StudentT(3.0)]
    pool = LogarithmicPool(members, WEIGHTS)
    q = dist.Normal(torch.tensor(0.3), torch.tensor(0.7))
    grid = torch.linspace(-40.0, 40.0, 400_001, dtype=torch.double)
    constant = torch.trapezoid(pool.log_prob(grid).exp(), grid)
    assert constant < 1.0
    density = q.log_prob(grid).exp()
    to_normalized = torch.trapezoid(density * (q.log_prob(grid) - pool.log_prob(grid) + constant.log()), grid)
    assert to_normalized > 0.0
    normals = LogarithmicPool(members[:2], [0.7, 0.3])
    constant_of_normals = torch.trapezoid(normals.log_prob(grid).exp(), grid)
    mean = torch.trapezoid(density * (q.log_prob(grid) - normals.log_prob(grid)), grid)
    # float32 in the closed form.
    assert float(kl_divergence(q, normals)) == pytest.approx(float(mean), rel=1e-5)
    precision, center = 0.7 / 0.25 + 0.3 / 4.0, (0.7 * -1.0 / 0.25 + 0.3 * 1.5 / 4.0)
    geometric = dist.Normal(center / precision, precision**-0.5)
    closed = kl_divergence(q, geometric) - constant_of_normals.log()
    assert float(kl_divergence(q, normals)) == pytest.approx(float(closed), rel=1e-5)


def test_the_log_density_is_the_weighted_mean_and_draws_are_the_first_s():
    members = [radial(0.0, 0.5), normal(1.0, 2.0), radial(-3.0, 1.0)]
    pool = LogarithmicPool(members, WEIGHTS)
    value = torch.randn(5, 3)
    expected = sum(weight * p.log_prob(value) for weight, p in zip(WEIGHTS, members, strict=True))
    torch.testing.assert_close(pool.log_prob(value), expected)
    assert torch.equal(pool.mean, members[0].mean)
    assert torch.equal(pool.variance, members[0].variance)
    assert pool.has_rsample
    assert pool.support.event_dim == 1
    for sample in ("sample", "rsample"):
        torch.manual_seed(0)
        draws = getattr(pool, sample)((4,))
        torch.manual_seed(0)
        assert torch.equal(draws, getattr(members[0], sample)((4,)))


@pytest.mark.parametrize("q", [radial(0.4, 0.7), normal(0.4, 0.7)], ids=["radial", "normal"])
def test_the_kl_is_the_weighted_sum_of_closed_ones_and_has_its_gradient(q):
    members = [radial(0.0, 0.5), normal(1.0, 2.0), radial(-3.0, 1.0)]
    pool = LogarithmicPool(members, WEIGHTS)
    expected = sum(weight * kl_divergence(q, p) for weight, p in zip(WEIGHTS, members, strict=True))
    torch.testing.assert_close(kl_divergence(q, pool), expected)
    assert abs(kl_divergence(q, LogarithmicPool([q, q], [0.5, 0.5]))) < 1e-6
    # Two normals pull with their precisions.
    loc = torch.tensor(0.5, requires_grad=True)
    two = LogarithmicPool([dist.Normal(0.0, 1.0), dist.Normal(4.0, 2.0)], [0.25, 0.75])
    (slope,) = torch.autograd.grad(kl_divergence(dist.Normal(loc, 1.0), two), loc)
    assert float(slope) == pytest.approx(0.25 * 0.5 + 0.75 * (0.5 - 4.0) / 4.0)


@pytest.mark.parametrize("form", ["expanded", "masked", "both"])
def test_batches_masks_and_expansion_are_those_of_its_members(form):
    mask = torch.tensor([True, False])
    members = [radial(0.0, 0.5), normal(1.0, 2.0)]
    q = radial(0.4, 0.7).expand([2])
    if form == "expanded":
        pool = LogarithmicPool(members, [0.5, 0.5]).expand([2])
        factor = torch.ones(2)
    elif form == "masked":
        pool, q = LogarithmicPool([p.expand([2]).mask(mask) for p in members], [0.5, 0.5]), q.mask(mask)
        factor = mask.float()
    else:
        pool = LogarithmicPool([p.expand([1]) for p in members], [0.5, 0.5]).expand([2])
        factor = torch.ones(2)
    assert pool.batch_shape == (2,)
    one = kl_divergence(radial(0.4, 0.7), LogarithmicPool(members, [0.5, 0.5]))
    torch.testing.assert_close(kl_divergence(q, pool), factor * one)
    assert pool.log_prob(torch.zeros(2, 3)).shape == (2,)


def test_a_member_without_a_closed_kl_leaves_the_pool_without_one():
    pool = LogarithmicPool([normal(0.0, 1.0), dist.Laplace(torch.zeros(3), 1.0).to_event(1)], [0.5, 0.5])
    with pytest.raises(NotImplementedError):
        kl_divergence(radial(0.0, 1.0), pool)


def test_the_kl_of_a_point_is_its_log_density():
    pool = LogarithmicPool([dist.Normal(0.0, 1.0), dist.Normal(4.0, 2.0)], [0.25, 0.75])
    value = torch.tensor(0.3)
    torch.testing.assert_close(kl_divergence(dist.Delta(value), pool), -pool.log_prob(value))


@pytest.mark.parametrize(
    ("members", "weights", "message"),
    [
        ([], [], "distributions must have one shape, got \\[\\]"),
        ([normal(0.0, 1.0), normal(0.0, 1.0, size=2)], [0.5, 0.5], "must have one shape"),
        ([normal(0.0, 1.0)], [0.5, 0.5], "weights must be 1 non-negative"),
        ([normal(0.0, 1.0)] * 2, [0.5, 0.6], "that sum to one"),
        ([normal(0.0, 1.0)] * 2, [1.5, -0.5], "non-negative"),
        ([normal(0.0, 1.0)] * 2, [math.nan, 1.0], "weights must be"),
    ],
)
def test_bad_input_is_named(members, weights, message):
    with pytest.raises(ValueError, match=message):
        LogarithmicPool(members, weights)
