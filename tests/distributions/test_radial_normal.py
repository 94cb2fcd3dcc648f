# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import AutoReparam, LocScaleReparam
from scipy import stats

from pyro_radial.distributions import RadialNormal
from tests.helpers.devices import recent_compiler

NUM_SAMPLES = 4_000


def test_one_element_per_event_is_exactly_normal():
    loc, scale = torch.randn(50, 1, dtype=torch.double), 0.1 + torch.rand(50, 1, dtype=torch.double)
    radial, normal = RadialNormal(loc, scale), dist.Normal(loc, scale)
    value = normal.sample((20,))
    value[0] = loc
    torch.testing.assert_close(radial.log_prob(value), normal.log_prob(value).squeeze(-1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(radial.entropy(), normal.entropy().squeeze(-1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(radial.variance, normal.variance)
    pyro.set_rng_seed(7)
    sample = radial.sample()
    pyro.set_rng_seed(7)
    torch.testing.assert_close(sample, normal.sample())


def test_the_density_integrates_to_one_in_two_dimensions():
    distribution = RadialNormal(
        torch.tensor([0.3, -0.2], dtype=torch.double), torch.tensor([0.7, 1.9], dtype=torch.double)
    )

    # Polar coordinates about loc, where the Jacobian cancels the pole; both rules are exact for smooth functions.
    angles = torch.arange(64, dtype=torch.double) * (2 * math.pi / 64)
    nodes, weights = (torch.tensor(values) for values in np.polynomial.legendre.leggauss(200))
    radii = 8.0 * (nodes + 1.0)[:, None]
    points = distribution.loc + radii[..., None] * torch.stack([angles.cos(), angles.sin()], -1)
    mass = distribution.log_prob(points).exp() * radii * 8.0 * weights[:, None] * (2 * math.pi / 64)
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-6)


def test_entropy_is_that_of_samples_in_many_dimensions():
    dim, count = 36_864, 400
    scale = 0.1 + torch.rand(dim, dtype=torch.double)
    distribution = RadialNormal(torch.randn(dim, dtype=torch.double), scale)
    draws = -distribution.log_prob(distribution.sample((count,)))
    assert abs(draws.mean() - distribution.entropy()) <= 4 * draws.std() / count**0.5


@pytest.mark.parametrize("event_dim", [1, 2])
def test_the_radius_is_half_normal_and_the_direction_uniform(event_dim):
    distribution = RadialNormal(torch.randn(4, 5), 0.5 + torch.rand(4, 5), event_dim)
    unit = (distribution.sample((NUM_SAMPLES,)) - distribution.loc) / distribution.scale
    unit = unit.reshape(-1, distribution.num_elements)
    radius = unit.norm(dim=-1)
    assert stats.kstest(radius.numpy(), "halfnorm").pvalue > 1e-3
    cosine = (unit / radius[:, None])[:, 0].numpy()
    n = distribution.num_elements
    assert stats.kstest(cosine**2, stats.beta(0.5, (n - 1) / 2).cdf).pvalue > 1e-3
    # Independent of the radius: the rank correlation of |cosine| and radius is zero up to 1/sqrt(count).
    assert abs(stats.spearmanr(abs(cosine), radius.numpy()).statistic) < 4 / len(radius) ** 0.5


def test_at_loc_the_density_is_infinite_and_its_gradient_zero():
    loc = torch.randn(3, 4, requires_grad=True)
    scale = (0.5 + torch.rand(3, 4)).requires_grad_()
    distribution = RadialNormal(loc, scale)
    value = loc.detach().clone().requires_grad_()
    log_prob = distribution.log_prob(value)
    assert bool(torch.isposinf(log_prob).all())
    log_prob.sum().backward()
    assert bool((value.grad == 0).all())
    assert bool((loc.grad == 0).all())
    assert bool(torch.isfinite(scale.grad).all())


@pytest.mark.parametrize(("event_dim", "samples"), [(0, ()), (1, (2,)), (2, (3, 2))])
def test_first_and_second_gradients_of_the_density_match_differences(event_dim, samples):
    value = torch.randn(*samples, 2, 3, dtype=torch.double, requires_grad=True)
    loc = torch.randn(3, dtype=torch.double, requires_grad=True)
    scale = (0.5 + torch.rand(2, 1, dtype=torch.double)).requires_grad_()

    def log_prob(value, loc, scale):
        return RadialNormal(loc, scale, event_dim).log_prob(value)

    assert torch.autograd.gradcheck(log_prob, (value, loc, scale), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(log_prob, (value, loc, scale))


def test_float32_is_accurate_in_a_million_dimensions():
    dim = 10**6
    loc, scale = torch.randn(dim), 0.01 + 0.1 * torch.rand(dim)
    value = RadialNormal(loc, scale).sample()
    results = []
    for dtype in (torch.float32, torch.float64):
        s = scale.to(dtype).requires_grad_()
        log_prob = RadialNormal(loc.to(dtype), s).log_prob(value.to(dtype))
        (grad,) = torch.autograd.grad(log_prob, s)
        results.append((log_prob.double(), grad.double()))
    (low, low_grad), (high, high_grad) = results
    assert abs(low / high - 1) < 1e-5
    assert (low_grad - high_grad).norm() / high_grad.norm() < 1e-4
    # Element by element too, against the size of the two terms that the gradient is a difference of.
    assert ((low_grad - high_grad).abs() * scale).max() < 1e-4 * (high_grad.abs() * scale).max()


def test_the_log_density_of_a_draw_depends_on_the_parameters_through_log_scale_alone():
    # The entropy's gradient, -1 / scale, with no noise: the distance of a draw from its own loc does not move.
    loc = torch.randn(50, dtype=torch.double, requires_grad=True)
    scale = (0.5 + torch.rand(50, dtype=torch.double)).requires_grad_()
    distribution = RadialNormal(loc, scale)
    distribution.log_prob(distribution.rsample()).backward()
    torch.testing.assert_close(loc.grad, torch.zeros_like(loc), atol=1e-10, rtol=0)
    torch.testing.assert_close(scale.grad, -1 / scale.detach(), rtol=1e-10, atol=0)


def test_infer_shapes_agrees_with_the_distribution():
    distribution = RadialNormal(torch.zeros(4, 1, 3), torch.ones(5, 3), 2)
    shapes = RadialNormal.infer_shapes(loc=torch.Size((4, 1, 3)), scale=torch.Size((5, 3)), event_dim=2)
    assert shapes == (distribution.batch_shape, distribution.event_shape)


@pytest.mark.parametrize("config", [{"w": LocScaleReparam(0.3)}, {"w": LocScaleReparam()}, AutoReparam()])
@pytest.mark.parametrize(("event_dim", "squared_norm"), [(2, 4.0), (1, 12.0), (0, 48.0)])
def test_reparameterizers_of_pyro_keep_how_many_dimensions_share_a_radius(event_dim, squared_norm, config):
    def model():
        loc, scale = torch.zeros(3, 4), torch.full((3, 4), 2.0)
        return pyro.sample("w", RadialNormal(loc, scale, event_dim=event_dim).to_event(2 - event_dim))

    run = poutine.reparam(model, config=config)
    with torch.no_grad():
        squares = torch.stack([run().square().sum() for _ in range(200)])
    error = squares.std() / len(squares) ** 0.5
    assert abs(squares.mean() - squared_norm) < 5 * error


def test_half_precision_samples_and_densities_are_finite():
    for dtype in (torch.float16, torch.bfloat16):
        distribution = RadialNormal(torch.zeros(1000, dtype=dtype), torch.ones(1000, dtype=dtype))
        value = distribution.sample()
        assert value.dtype == dtype
        assert bool(torch.isfinite(distribution.log_prob(value)))


def test_an_empty_event_is_refused():
    with pytest.raises(ValueError, match="elements in their event"):
        RadialNormal(torch.zeros(2, 0), torch.ones(2, 0))


def _draw_and_densities(loc, scale):
    distribution = RadialNormal(loc, scale, validate_args=False)
    value = distribution.rsample()
    return value, distribution.log_prob(value), distribution.entropy()


# The compiler itself makes an instance of autograd.Function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@recent_compiler
def test_it_compiles_to_one_graph_and_batches_under_vmap():
    loc, scale = torch.randn(4, 5), 0.1 + torch.rand(4, 5)
    compiled = torch.compile(_draw_and_densities, backend="eager", fullgraph=True)
    pyro.set_rng_seed(0)
    expected = _draw_and_densities(loc, scale)
    pyro.set_rng_seed(0)
    for ours, theirs in zip(compiled(loc, scale), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    value, log_prob, entropy = torch.func.vmap(_draw_and_densities, randomness="different")(loc, scale)
    torch.testing.assert_close(log_prob, RadialNormal(loc, scale).log_prob(value))
    torch.testing.assert_close(entropy, RadialNormal(loc, scale).entropy())


@pytest.mark.cuda
def test_on_cuda_samples_and_densities_are_those_of_the_cpu():
    loc, scale = torch.randn(1000), 0.5 + torch.rand(1000)
    distribution = RadialNormal(loc.cuda(), scale.cuda())
    value = distribution.sample()
    assert value.is_cuda
    torch.testing.assert_close(distribution.log_prob(value).cpu(), RadialNormal(loc, scale).log_prob(value.cpu()))
    torch.testing.assert_close(distribution.entropy().cpu(), RadialNormal(loc, scale).entropy())
