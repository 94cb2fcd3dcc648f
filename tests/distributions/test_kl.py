# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import biject_to, kl_divergence

from pyro_radial.distributions import RadialNormal
from tests.helpers.distributions import assert_kl_is_that_of_samples

FULL = (3, 4, 5)


@pytest.fixture
def q():
    return RadialNormal(torch.randn(FULL, dtype=torch.double), 0.2 + torch.rand(FULL, dtype=torch.double), 2)


@pytest.fixture
def p():
    return dist.Normal(torch.randn(FULL, dtype=torch.double), 0.5 + torch.rand(FULL, dtype=torch.double))


@pytest.mark.parametrize(
    ("dim", "least", "half_digit"),
    [(2, 0.216, 5e-4), (10, 4.43, 5e-3), (100, 60.4, 0.05), (1000, 630.9, 0.05), (36_864, 23_409, 0.5)],
)
def test_the_least_kl_to_a_standard_normal_is_the_known_floor(dim, least, half_digit):
    q = RadialNormal(torch.zeros(dim), torch.full((dim,), math.sqrt(dim)))
    p = dist.Normal(0.0, 1.0).expand([dim]).to_event(1)
    value = kl_divergence(q, p)
    assert float(value) == pytest.approx(least, abs=half_digit)
    # It is the least: any other common scale costs more.
    for factor in (0.9, 1.1):
        assert kl_divergence(RadialNormal(q.loc, q.scale * factor), p) > value


MASK = torch.tensor([True, False, True])
NESTINGS = {
    "one radius per row": lambda q, p: (RadialNormal(q.loc, q.scale, 1).to_event(1), p.to_event(2)),
    "elements masked": lambda q, p: (q, p.mask(torch.arange(60).reshape(FULL) % 3 > 0).to_event(2)),
    "masked in different places": lambda q, p: (q.mask(MASK), p.to_event(2).mask(torch.tensor([True, False, False]))),
    "masked with False": lambda q, p: (q, p.to_event(2).mask(False)),
    "rows masked": lambda q, p: (RadialNormal(q.loc, q.scale, 1).to_event(1), p.to_event(2).mask(MASK)),
    "expanded prior": lambda q, p: (q, dist.Normal(0.0, 1.0).expand([4, 5]).to_event(2).expand([3])),
    "masked, expanded prior": lambda q, p: (q, dist.Normal(0.0, 1.0).expand([4, 5]).to_event(2).mask(True).expand([3])),
    "expanded posterior": lambda q, p: (RadialNormal(q.loc[0], q.scale[0], 2).expand([3]), p.to_event(2)),
    "full covariance": lambda q, p: (
        RadialNormal(q.loc, q.scale, 1),
        dist.MultivariateNormal(p.loc, p.scale.unsqueeze(-1) * p.scale.unsqueeze(-2) + torch.eye(5)),
    ),
    "normal to masked normal": lambda q, p: (dist.Normal(q.loc, q.scale).to_event(2), p.to_event(2).mask(MASK)),
}


@pytest.mark.parametrize("nesting", NESTINGS.values(), ids=NESTINGS.keys())
def test_kl_is_exact_under_any_nesting(nesting, q, p):
    assert_kl_is_that_of_samples(*nesting(q, p))


INDEPENDENT = {
    "independent": lambda p: p.to_event(1),
    "repeated": lambda p: dist.Normal(p.loc[0, 0], p.scale[0, 0]).expand([3, 4, 5]).to_event(1),
    "expanded outside": lambda p: dist.Normal(p.loc[0, 0], p.scale[0, 0]).to_event(1).expand([3, 4]),
    "one for all": lambda p: dist.Normal(p.loc[0, 0], p.scale[0, 0]).to_event(1),
    "masked": lambda p: p.to_event(1).mask(torch.tensor(True)),
}


def full_covariance(last):
    rows = torch.randn(*FULL, FULL[-1], dtype=torch.double).tril(-1)
    diagonal = 0.5 + torch.rand(FULL, dtype=torch.double)
    diagonal[..., -1] *= last
    return dist.MultivariateNormal(torch.randn(FULL, dtype=torch.double), scale_tril=rows + diagonal.diag_embed())


def low_rank(wide):
    factor = wide * torch.randn(*FULL, 2, dtype=torch.double)
    diagonal = 0.5 + torch.rand(FULL, dtype=torch.double)
    return dist.LowRankMultivariateNormal(torch.randn(FULL, dtype=torch.double), factor, diagonal)


@pytest.mark.parametrize("nesting", INDEPENDENT.values(), ids=INDEPENDENT)
@pytest.mark.parametrize(
    ("make", "size", "rtol"),
    [(full_covariance, 1.0, 1e-12), (full_covariance, 1e-9, 1e-12), (low_rank, 1.0, 1e-9), (low_rank, 1e3, 1e-9)],
    ids=["full", "almost singular", "low rank", "wide"],
)
def test_kl_from_a_normal_with_covariances_to_independent_ones_is_torchs_of_two_full_ones(p, nesting, make, size, rtol):
    q, independent = make(size), nesting(p)
    full = dist.MultivariateNormal(independent.mean, scale_tril=independent.stddev.diag_embed())
    dense = q if make is full_covariance else dist.MultivariateNormal(q.loc, q.covariance_matrix)
    torch.testing.assert_close(kl_divergence(q, independent), kl_divergence(dense, full), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("family", [RadialNormal, dist.Normal])
def test_kl_to_a_log_normal_is_closed_on_its_support(family, p):
    prior = dist.LogNormal(p.loc, p.scale).to_event(2)
    loc, scale = torch.randn(FULL, dtype=torch.double), torch.full(FULL, 0.5, dtype=torch.double)
    base = RadialNormal(loc, scale, 2) if family is RadialNormal else dist.Normal(loc, scale).to_event(2)
    # The support that a guide sees is exp followed by a trivial affine map, the prior's own transform is exp alone.
    q = dist.TransformedDistribution(base, [biject_to(prior.support)])
    torch.testing.assert_close(kl_divergence(q, prior), kl_divergence(base, p.to_event(2)))


def test_kl_is_never_negative_and_its_gradients_match_differences(q, p):
    loc, scale = q.loc.clone().requires_grad_(), q.scale.clone().requires_grad_()
    assert bool((kl_divergence(q, p.to_event(2)) >= 0).all())
    torch.autograd.gradcheck(lambda a, b: kl_divergence(RadialNormal(a, b, 2), p.to_event(2)), (loc, scale))


def test_other_shapes_and_transforms_are_left_to_sampling(q, p):
    sigmoid = dist.TransformedDistribution(q, [dist.transforms.SigmoidTransform()])
    for first, second in ((q, p), (q, p.to_event(1)), (sigmoid, dist.LogNormal(p.loc, p.scale).to_event(2))):
        with pytest.raises(NotImplementedError):
            kl_divergence(first, second)
