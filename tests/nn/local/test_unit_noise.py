# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_radial.distributions import HypersphericalUniform, RadialNormal
from pyro_radial.nn.local.unit_noise import UnitNoise, unit_noise
from tests.helpers.distributions import assert_same_distribution

NUM_DRAWS = 100_000

POSTERIORS = {
    "radial matrix": lambda loc, scale: RadialNormal(loc, scale, 2),
    "radial rows": lambda loc, scale: RadialNormal(loc, scale, 1).to_event(1),
    "radial elements": lambda loc, scale: RadialNormal(loc, scale, 0).to_event(2),
    "normal": lambda loc, scale: dist.Normal(loc, scale).to_event(2),
}
each_posterior = pytest.mark.parametrize("make", POSTERIORS.values(), ids=POSTERIORS)


def posterior(make, outputs, inputs, dtype=torch.float32):
    return make(torch.randn(outputs, inputs, dtype=dtype), 0.2 + torch.rand(outputs, inputs, dtype=dtype))


def outputs_of(noise, a, number):
    """Outputs of a linear layer for as many rows of one input."""
    stddev = ((noise.scale * a) ** 2).sum(-1).sqrt()
    return noise.loc @ a + noise.draw_for_outputs(stddev.expand(number, -1))


@each_posterior
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 4), (4, 1), (1, 5), (1, 1), (2, 2), (3, 3)])
def test_outputs_of_one_example_are_those_of_drawn_matrices(make, outputs, inputs):
    distribution, a = posterior(make, outputs, inputs), torch.randn(inputs)
    drawn = distribution.sample((NUM_DRAWS,)) @ a
    assert_same_distribution(outputs_of(unit_noise(distribution), a, NUM_DRAWS), drawn)


@each_posterior
def test_draws_are_those_of_the_distribution(make):
    distribution = posterior(make, 2, 3)
    draws = unit_noise(distribution).draw((NUM_DRAWS, 2, 3))
    assert_same_distribution(draws, distribution.sample((NUM_DRAWS,)))


@pytest.mark.parametrize(("radius_dim", "shape"), [(1, (3, 4)), (2, (3, 4)), (1, (4, 1)), (1, (3, 2))])
def test_a_radius_of_a_user_s_own_is_that_of_the_outputs(radius_dim, shape):
    def radius(like):
        return 1.0 + torch.rand_like(like)

    noise = UnitNoise(torch.randn(shape), torch.rand(shape) + 0.2, radius_dim, radius)
    a = torch.randn(shape[-1])
    directions = torch.randn(NUM_DRAWS, *shape)
    directions /= torch.linalg.vector_norm(directions, dim=(-2, -1)[2 - radius_dim :], keepdim=True)
    radii = radius(torch.empty(NUM_DRAWS, shape[0] if radius_dim == 1 else 1, 1))
    drawn = (noise.loc + noise.scale * directions * radii) @ a
    assert_same_distribution(outputs_of(noise, a, NUM_DRAWS), drawn)
    assert_same_distribution(noise.draw((NUM_DRAWS, *shape)) @ a, drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@each_posterior
def test_noise_has_the_dtype_of_its_parameters(make, dtype):
    noise = unit_noise(posterior(make, 3, 4, dtype))
    assert noise.draw((5, 3, 4)).dtype == dtype
    outputs = noise.draw_for_outputs(torch.rand(5, 3, dtype=dtype))
    assert outputs.dtype == dtype
    assert torch.isfinite(outputs).all()


def test_other_distributions_have_no_noise():
    assert unit_noise(dist.Laplace(torch.zeros(3), 1.0).to_event(1)) is None
    assert unit_noise(dist.LogNormal(torch.zeros(3), 1.0).to_event(1)) is None
    assert unit_noise(HypersphericalUniform(3)) is None


@each_posterior
def test_gradients_are_those_of_the_same_noise_by_finite_differences(make):
    loc, a = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def outputs(scale):
        pyro.set_rng_seed(0)
        return outputs_of(unit_noise(make(loc, scale)), a, 5)

    assert torch.autograd.gradcheck(outputs, (0.5 + torch.rand(3, 4, dtype=torch.float64)).requires_grad_())
