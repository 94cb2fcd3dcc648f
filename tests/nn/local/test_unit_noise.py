# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from pyro_radial.distributions import HypersphericalUniform, RadialNormal
from pyro_radial.nn.local.unit_noise import UnitNoise, half_normal, noisy_output, unit_noise
from tests.helpers.distributions import assert_same_distribution, assert_same_mean

NUM_DRAWS, NUM_ROWS = 30_000, 15_000

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
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 4), (4, 1), (1, 5), (1, 1), (2, 3)])
def test_draws_are_those_of_the_distribution_and_outputs_those_of_drawn_matrices(make, outputs, inputs):
    distribution, a = posterior(make, outputs, inputs), torch.randn(inputs)
    noise, drawn = unit_noise("w", distribution), distribution.sample((NUM_DRAWS,))
    assert_same_distribution(noise.draw((NUM_DRAWS, outputs, inputs)), drawn)
    assert_same_distribution(outputs_of(noise, a, NUM_DRAWS), drawn @ a)


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
    noise = unit_noise("w", posterior(make, 3, 4, dtype))
    assert noise.draw((5, 3, 4)).dtype == dtype
    outputs = noise.draw_for_outputs(torch.rand(5, 3, dtype=dtype))
    assert outputs.dtype == dtype
    assert torch.isfinite(outputs).all()


def test_other_distributions_have_no_noise_and_are_refused_by_name():
    scalars = dist.Laplace(torch.zeros(3), 1.0), dist.LogNormal(torch.zeros(3), 1.0)
    for distribution in (*(each.to_event(1) for each in scalars), HypersphericalUniform(3)):
        with pytest.raises(ValueError, match="'w'"):
            unit_noise("w", distribution)


@each_posterior
def test_gradients_are_those_of_the_same_noise_by_finite_differences(make):
    loc, a = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def outputs(scale):
        pyro.set_rng_seed(0)
        return outputs_of(unit_noise("w", make(loc, scale)), a, 5)

    assert torch.autograd.gradcheck(outputs, (0.5 + torch.rand(3, 4, dtype=torch.float64)).requires_grad_())


LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear on positions": (lambda: nn.Linear(3, 2), (2, 3)),
    "linear on a grid": (lambda: nn.Linear(2, 2), (2, 2, 2)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2), (2, 3)),
    "conv1d, circular": (lambda: nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (2, 3)),
    "conv2d": (lambda: nn.Conv2d(2, 2, 2), (2, 2, 3)),
    "conv2d, strided": (lambda: nn.Conv2d(1, 2, 2, stride=2, padding=1), (1, 2, 2)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 2, 2, groups=2), (4, 2, 2)),
    "conv2d, reflected": (lambda: nn.Conv2d(1, 2, 2, padding="same", padding_mode="reflect"), (1, 2, 2)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 2, 2, 2)),
}
RADIUS_DIMS = {"normal": None, "one radius": 0, "a radius for each output": 1, "radii within outputs": -1}
# Each layer once and each posterior in turn; two layers with every posterior.
PAIRS = list(zip(LAYERS, itertools.cycle(RADIUS_DIMS), strict=False))
PAIRS += [pair for pair in itertools.product(["linear", "conv2d"], RADIUS_DIMS) if pair not in PAIRS]
each_pair = pytest.mark.parametrize(("name", "radius_dim"), PAIRS)


def radius_dim_of(parameter, kind):
    """How many of its last dimensions share a radius."""
    return 1 if kind < 0 else max(1, parameter.dim() - kind)


def posterior_around(parameter, kind):
    """A distribution around a layer's own parameter."""
    loc, scale = parameter.detach(), 0.2 + torch.rand(parameter.shape)
    if kind is None:
        return dist.Normal(loc, scale).to_event(loc.dim())
    radius_dim = radius_dim_of(parameter, kind)
    return RadialNormal(loc, scale, radius_dim).to_event(loc.dim() - radius_dim)


def rows_of(layer, x, *noises):
    """Outputs of independent calls for the batch, one row after the other in the last dimension."""
    return vmap(lambda _: noisy_output(layer, x, *noises), randomness="different")(torch.empty(NUM_ROWS))


@each_pair
def test_outputs_are_those_of_drawn_parameters_and_uncorrelated_between_rows(name, radius_dim):
    (make, shape), kind = LAYERS[name], RADIUS_DIMS[radius_dim]
    layer, x = make(), torch.randn(2, *shape)[[0, 1, 1]]
    distributions = {name: posterior_around(parameter, kind) for name, parameter in layer.named_parameters()}
    drawn = vmap(lambda draw: functional_call(layer, draw, (x,)))(
        {name: distribution.sample((NUM_ROWS,)) for name, distribution in distributions.items()}
    )
    local = rows_of(layer, x, *(unit_noise(*named) for named in distributions.items()))
    assert local.shape == drawn.shape
    for row in (0, 2):
        # The joint distribution over all positions and outputs of a row.
        assert_same_distribution(local[:, row], drawn[:, row])
    first, second = (local - local.mean(0)).double().flatten(2)[:, 1:].unbind(1)
    assert_same_mean(first * second, torch.zeros_like(first))


def test_equal_rows_turn_their_shared_direction_each_in_its_own_way():
    layer, x = nn.Conv1d(8, 2, 3, bias=False), torch.randn(1, 8, 3).expand(2, 8, 3)
    noise = UnitNoise(torch.zeros_like(layer.weight), torch.ones_like(layer.weight))
    first, second = rows_of(layer, x, noise, None).detach().flatten(2).unbind(1)
    # Signs of outputs alone would leave sizes as they are.
    correlation = torch.corrcoef(torch.stack([first[:, 0].square(), second[:, 0].square()]))[0, 1]
    assert abs(float(correlation)) < 0.5


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_weight_or_a_bias_alone_may_have_noise(make, shape):
    layer, x = make(), torch.randn(3, *shape)
    weight, bias = (unit_noise("w", posterior_around(parameter, 0)) for parameter in layer.parameters())
    plain = layer(x)
    torch.testing.assert_close(noisy_output(layer, x, layer.weight, layer.bias), plain)
    of_bias = noisy_output(layer, x, layer.weight, bias) - plain
    channel = -1 if isinstance(layer, nn.Linear) else 1
    positions = of_bias.movedim(channel, 1).reshape(3, layer.bias.numel(), -1)
    # The same at all positions of a row.
    torch.testing.assert_close(positions, positions[..., :1].expand_as(positions), atol=1e-5, rtol=0.0)
    assert not torch.allclose(positions[0], positions[1])
    without = noisy_output(layer, x, weight, None)
    assert without.shape == plain.shape
    assert not torch.allclose(without, plain)


@each_pair
def test_inputs_that_are_zero_have_finite_gradients(name, radius_dim):
    (make, shape), kind = LAYERS[name], RADIUS_DIMS[radius_dim]
    layer, x = make(), torch.zeros(3, *shape, requires_grad=True)
    scales = [torch.ones_like(parameter).requires_grad_() for parameter in layer.parameters()]
    noises = [
        UnitNoise(parameter, scale, *(() if kind is None else (radius_dim_of(parameter, kind), half_normal)))
        for parameter, scale in zip(layer.parameters(), scales, strict=True)
    ]
    output = noisy_output(layer, x, *noises)
    gradients = torch.autograd.grad(output.square().sum(), [x, *scales])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    bias = noises[1].loc.reshape(-1, *(1,) * (0 if isinstance(layer, nn.Linear) else output.dim() - 2))
    assert not torch.allclose(output, bias.expand_as(output))
