# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch.distributions import kl_divergence

from pyro_radial.distributions import HypersphericalUniform, RadialDirectional, RadialNormal, VonMisesFisherStable
from pyro_radial.distributions.radial_directional import mean_log

NUM_SAMPLES = 40_000


def double(value):
    return torch.tensor(value, dtype=torch.double)


def radial_pair(dim):
    """The same distribution made in two ways."""
    direction = HypersphericalUniform(dim, like=double(0.0))
    zeros, ones = torch.zeros(dim, dtype=torch.double), torch.ones(dim, dtype=torch.double)
    return RadialDirectional(dist.HalfNormal(double(1.0)), direction), RadialNormal(zeros, ones)


def directed(batch=(), dim=3, dtype=torch.double):
    """A distribution with a radius and a direction of its own for each element of a batch."""
    loc = torch.nn.functional.normalize(torch.randn(*batch, dim, dtype=dtype), dim=-1)
    radius = dist.LogNormal(0.3 * torch.randn(batch, dtype=dtype), 0.2 + 0.3 * torch.rand(batch, dtype=dtype))
    return RadialDirectional(radius, VonMisesFisherStable(loc, 0.5 + 3 * torch.rand(batch, dtype=dtype)))


@pytest.mark.parametrize("dim", [2, 3, 10, 1000])
def test_a_half_normal_radius_and_a_uniform_direction_are_the_radial_normal(dim):
    distribution, radial = radial_pair(dim)
    value = radial.sample((50,))
    torch.testing.assert_close(distribution.log_prob(value), radial.log_prob(value), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(distribution.entropy(), radial.entropy(), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(distribution.mean, radial.mean)
    torch.testing.assert_close(distribution.variance, radial.variance)


# A trapezoidal rule in log r, with the Jacobian of polar coordinates: all densities vanish at both ends.
LOG_NORMS = torch.linspace(-30.0, 12.0, 4001, dtype=torch.double)
STEP = LOG_NORMS[1] - LOG_NORMS[0]
POSITIVE = [
    dist.HalfNormal(double(0.8)),
    dist.LogNormal(double(-0.2), double(0.6)),
    dist.Gamma(double(2.5), double(2.0)),
]


@pytest.mark.parametrize("radius", POSITIVE)
def test_the_density_integrates_to_one_in_two_dimensions(radius):
    distribution = RadialDirectional(radius, VonMisesFisherStable(double([0.6, 0.8]), double(2.0)))
    angles = 2 * math.pi * torch.arange(64, dtype=torch.double) / 64
    norms = LOG_NORMS.exp()[:, None]
    points = norms[..., None] * torch.stack([angles.cos(), angles.sin()], -1)
    total = (distribution.log_prob(points).exp() * norms**2).sum() * STEP * 2 * math.pi / 64
    assert float(total) == pytest.approx(1.0, abs=1e-9)


RADII = {
    "log-normal": dist.LogNormal(double(0.4), double(0.7)),
    "half-normal": dist.HalfNormal(double(1.7)),
    "gamma": dist.Gamma(double(2.0), double(3.0)),
    "inverse gamma": dist.InverseGamma(double(3.0), double(0.5)),
    "half-Cauchy": dist.HalfCauchy(double(0.3)),
}


@pytest.mark.parametrize("radius", RADII.values(), ids=RADII.keys())
def test_the_mean_log_radius_is_that_of_samples(radius):
    draws = radius.sample((NUM_SAMPLES,)).log()
    assert abs(draws.mean() - mean_log(radius)) <= 4 * draws.std() / NUM_SAMPLES**0.5


@pytest.mark.parametrize("radius", RADII.values(), ids=RADII.keys())
@pytest.mark.parametrize("dim", [2, 30])
def test_the_entropy_is_that_of_samples(radius, dim):
    loc = torch.nn.functional.normalize(torch.ones(dim, dtype=torch.double), dim=0)
    distribution = RadialDirectional(radius, VonMisesFisherStable(loc, double(3.0)))
    draws = -distribution.log_prob(distribution.sample((NUM_SAMPLES,)))
    assert abs(draws.mean() - distribution.entropy()) <= 4 * draws.std() / NUM_SAMPLES**0.5


def test_the_entropy_of_another_radius_is_not_implemented():
    distribution = RadialDirectional(dist.Weibull(1.0, 1.5), HypersphericalUniform(3))
    with pytest.raises(NotImplementedError, match="Weibull"):
        distribution.entropy()


def test_batches_broadcast_and_each_element_has_draws_of_its_own():
    distribution = RadialDirectional(dist.HalfNormal(torch.ones(3, 1)), HypersphericalUniform(4).expand([2]))
    assert (distribution.batch_shape, distribution.event_shape) == ((3, 2), (4,))
    norm = distribution.sample((1000,)).norm(dim=-1)
    assert norm.shape == (1000, 3, 2)
    correlation = torch.corrcoef(norm.flatten(1).T)
    assert bool(((correlation - torch.eye(6)).abs() < 4.5 / 1000**0.5).all())


def test_gradients_flow_to_both_distributions_through_a_draw():
    loc, scale = double(0.3).requires_grad_(), double(0.5).requires_grad_()
    concentration = double(2.0).requires_grad_()
    distribution = RadialDirectional(
        dist.LogNormal(loc, scale), VonMisesFisherStable(double([0.0, 0.6, 0.8]), concentration)
    )
    assert distribution.has_rsample
    # d E[w] by the parameters, by the gradient of one mean of many draws.
    distribution.rsample((NUM_SAMPLES,)).mean(0)[2].backward()
    expected = torch.autograd.grad(distribution.mean[2], [loc, scale, concentration])
    for parameter, gradient in zip((loc, scale, concentration), expected, strict=True):
        assert float(parameter.grad) == pytest.approx(float(gradient), rel=0.05)
    assert not distribution.sample().requires_grad


@pytest.mark.parametrize(
    ("radius", "sign"),
    [(dist.HalfNormal(double(1.0)), 1), (dist.HalfCauchy(double(1.0)), 1), (dist.LogNormal(double(0.0), 1.0), -1)],
)
def test_at_zero_the_density_is_infinite_or_zero_and_its_gradient_zero(radius, sign):
    direction = VonMisesFisherStable(double([0.6, 0.8]), double(2.0))
    distribution = RadialDirectional(radius, direction)
    value = double([[0.0, 0.0], [0.3, -0.2]]).requires_grad_()
    log_prob = distribution.log_prob(value)
    assert float(log_prob[0].detach()) == sign * math.inf
    assert bool(log_prob[1].isfinite())
    (gradient,) = torch.autograd.grad(log_prob.sum(), value)
    assert bool((gradient[0] == 0).all())
    assert bool(gradient[1].isfinite().all())


def test_float32_keeps_its_digits_in_many_dimensions():
    # A float32 norm of so many elements is off by 1e-3.
    dim = 5_000_000
    distribution = RadialDirectional(dist.LogNormal(torch.tensor(0.5), 0.1), HypersphericalUniform(dim))
    value = distribution.sample()
    wide = RadialDirectional(dist.LogNormal(double(0.5), double(0.1)), HypersphericalUniform(dim, like=double(0.0)))
    expected = wide.log_prob(value.double())
    assert float(distribution.log_prob(value)) == pytest.approx(float(expected), rel=1e-6)


def test_kl_reaches_the_prior_of_a_log_normal_radius_and_a_uniform_direction():
    q = directed((3,), 4)
    p = RadialDirectional(dist.Gamma(double(0.5), double(1.0)), HypersphericalUniform(4, like=double(0.0)))
    expected = kl_divergence(q.radius, p.radius) + kl_divergence(q.direction, p.direction)
    torch.testing.assert_close(kl_divergence(q.to_event(1), p.expand([3]).to_event(1)), expected.sum())


def test_kl_between_different_dimensions_is_not_implemented():
    with pytest.raises(NotImplementedError):
        kl_divergence(directed(dim=3), directed(dim=4))


def test_it_batches_under_vmap():
    distribution = directed((3,), 4)
    value = distribution.sample((6,))
    torch.testing.assert_close(torch.func.vmap(distribution.log_prob)(value), distribution.log_prob(value))


UNIFORM = HypersphericalUniform(3)


@pytest.mark.parametrize(
    ("radius", "direction", "words"),
    [
        (dist.Poisson(1.0), UNIFORM, "radius must be a positive"),
        (
            dist.HalfNormal(1.0),
            dist.Normal(torch.zeros(3), 1.0).to_event(1),
            "direction must be a distribution of unit",
        ),
        (dist.HalfNormal(1.0), dist.Normal(0.0, 1.0), "direction must be a distribution of unit"),
        (dist.HalfNormal(1.0), UNIFORM.expand([2]).to_event(1), "direction must be a distribution of unit"),
        (dist.HalfNormal(torch.ones(4)), UNIFORM.expand([3]), "radius and direction .*broadcast"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(radius, direction, words):
    with pytest.raises(ValueError, match=words):
        RadialDirectional(radius, direction)


def test_a_value_outside_the_support_is_refused_under_validation():
    distribution = RadialDirectional(dist.HalfNormal(1.0), UNIFORM, validate_args=True)
    assert distribution.support is constraints.real_vector
    with pytest.raises(ValueError, match="support"):
        distribution.log_prob(torch.tensor([0.0, math.nan, 1.0]))
