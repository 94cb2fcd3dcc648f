# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0


import math

import numpy as np
import pyro
import pytest
import torch
from torch.distributions import kl_divergence
from torch.nn.functional import normalize

from pyro_radial.distributions import HypersphericalUniform, VonMisesFisherStable
from pyro_radial.distributions.vmf.functions import mean_cosine
from tests.helpers.devices import recent_compiler, waiting_is_an_error

NUM_SAMPLES = 10_000
CONCENTRATIONS = [0.0, 1e-30, 1e-6, 1e-3, 1.0, 30.0, 1e4, 1e6]


def sphere_points(dim):
    """Points and weights of a quadrature over the circle or the sphere, exact for smooth functions."""
    angle = np.arange(128) * (2 * math.pi / 128)
    if dim == 2:
        points, weights = np.stack([np.cos(angle), np.sin(angle)], -1), np.full(128, 2 * math.pi / 128)
    else:
        height, leggauss_weights = np.polynomial.legendre.leggauss(128)
        ring = np.sqrt(1.0 - height**2)[:, None]
        points = np.stack(
            [ring * np.cos(angle), ring * np.sin(angle), np.broadcast_to(height[:, None], (128, 128))], -1
        ).reshape(-1, 3)
        weights = (leggauss_weights[:, None] * np.full(128, 2 * math.pi / 128)).reshape(-1)
    return torch.tensor(points), torch.tensor(weights)


def unit(*shape, dtype=torch.double):
    return normalize(torch.randn(shape, dtype=dtype), dim=-1)


def von_mises_fisher(*shape, concentration=5.0, dtype=torch.double):
    return VonMisesFisherStable(unit(*shape, dtype=dtype), torch.tensor(concentration, dtype=dtype))


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("concentration", [0.0, 0.5, 30.0])
def test_density_moments_and_entropy_are_their_integrals_over_the_sphere(dim, concentration):
    distribution = von_mises_fisher(dim, concentration=concentration)
    points, weights = sphere_points(dim)
    log_prob = distribution.log_prob(points)
    mass = weights * log_prob.exp()
    assert float(mass.sum()) == pytest.approx(1.0, abs=1e-12)
    mean = mass @ points
    torch.testing.assert_close(distribution.mean, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(distribution.variance, mass @ (points - mean).square(), rtol=0, atol=1e-12)
    torch.testing.assert_close(distribution.entropy(), -(mass * log_prob).sum(), rtol=0, atol=1e-12)
    torch.testing.assert_close(distribution.mode, distribution.loc)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("dim", [2, 3, 10, 500])
def test_nothing_is_nan_or_infinite_at_any_concentration(dim, dtype):
    raw = torch.randn(len(CONCENTRATIONS), dim, dtype=dtype, requires_grad=True)
    kappa = torch.tensor(CONCENTRATIONS, dtype=dtype, requires_grad=True)
    distribution = VonMisesFisherStable(normalize(raw, dim=-1), kappa)
    other = von_mises_fisher(len(CONCENTRATIONS), dim, dtype=dtype)
    uniform = HypersphericalUniform(dim, like=raw)
    value = distribution.rsample()
    scalars = [distribution.log_prob(draw) for draw in (value, other.sample())]
    scalars += [distribution.entropy(), distribution.variance, distribution.mean, value * torch.randn_like(value)]
    scalars += [kl_divergence(distribution, p) for p in (other, distribution, uniform)]
    scalars += [kl_divergence(q, distribution) for q in (other, uniform)]
    for scalar in scalars:
        assert bool(scalar.isfinite().all())
        first = torch.autograd.grad(scalar.sum(), (raw, kappa), create_graph=True, allow_unused=True)
        for gradient in first:
            assert gradient is None or bool(gradient.isfinite().all())
        again = [g.sum() for g in first if g is not None and g.requires_grad]
        second = torch.autograd.grad(sum(again), (raw, kappa), allow_unused=True, retain_graph=True) if again else ()
        for gradient in second:
            assert gradient is None or bool(gradient.isfinite().all())


@pytest.mark.parametrize("dim", [2, 10, 500])
def test_gradients_of_density_and_entropy_match_differences(dim):
    value, raw = unit(3, dim), torch.randn(3, dim, dtype=torch.double, requires_grad=True)
    kappa = torch.tensor([0.3, 5.0, 200.0], dtype=torch.double, requires_grad=True)

    def scalars(raw, kappa):
        distribution = VonMisesFisherStable(normalize(raw, dim=-1), kappa, validate_args=False)
        return distribution.log_prob(value), distribution.entropy()

    assert torch.autograd.gradcheck(scalars, (raw, kappa), fast_mode=dim > 10)
    assert torch.autograd.gradgradcheck(scalars, (raw, kappa), fast_mode=dim > 10)


@pytest.mark.parametrize(("dim", "concentration"), [(2, 1.5), (3, 4.0), (5, 2.0), (30, 40.0)])
def test_the_gradient_of_an_expectation_over_draws_is_unbiased(dim, concentration):
    # E (a . x)^2 has the closed form below, from the moments of the distribution.
    a, raw = torch.randn(dim, dtype=torch.double), torch.randn(dim, dtype=torch.double)
    kappa = torch.full((NUM_SAMPLES,), concentration, dtype=torch.double, requires_grad=True)
    rows = raw.repeat(NUM_SAMPLES, 1).requires_grad_()
    value = VonMisesFisherStable(normalize(rows, dim=-1), kappa).rsample()
    draws = torch.autograd.grad((value @ a).square().sum(), (rows, kappa))
    raw.requires_grad_()
    one = torch.tensor(concentration, dtype=torch.double, requires_grad=True)
    loc, mean = normalize(raw, dim=-1), mean_cosine(one, dim)
    across, square = mean / one, 1.0 - (dim - 1) * mean / one
    exact = across * a @ a + (square - across) * (a @ loc).square()
    for draw, gradient in zip(draws, torch.autograd.grad(exact, (raw, one)), strict=True):
        assert bool(((draw.mean(0) - gradient).abs() <= 4 * draw.std(0) / NUM_SAMPLES**0.5).all())


@pytest.mark.parametrize("dim", [2, 3])
def test_kl_is_its_integral_over_the_sphere(dim):
    q, p = von_mises_fisher(dim, concentration=4.0), von_mises_fisher(dim, concentration=1.5)
    uniform = HypersphericalUniform(dim, like=q.loc)
    points, weights = sphere_points(dim)
    for first, second in ((q, p), (p, q), (q, uniform), (uniform, q)):
        log_ratio = first.log_prob(points) - second.log_prob(points)
        exact = (weights * first.log_prob(points).exp() * log_ratio).sum()
        torch.testing.assert_close(kl_divergence(first, second), exact, rtol=1e-11, atol=0)
    assert float(kl_divergence(uniform, uniform)) == 0.0


@pytest.mark.parametrize("dim", [2, 3, 50, 500, 10**5])
def test_in_float32_kl_is_never_negative_and_zero_with_zero_gradient_at_equality(dim):
    kappa = torch.tensor([0.0, *np.geomspace(1e-6, 1e6, 40)], dtype=torch.float)
    loc = unit(1, dim, dtype=torch.float)
    for factor in (0.5, 0.9, 0.99, 0.9999, 1.0, 1.0 + 1e-6, 2.0, 100.0):
        q = VonMisesFisherStable(loc, kappa)
        kl = kl_divergence(q, VonMisesFisherStable(loc, kappa * factor))
        assert bool((kl >= 0).all())
        assert bool((kl_divergence(q, VonMisesFisherStable(-loc, kappa * factor)) >= kl).all())
    raw = loc.expand(len(kappa), dim).clone().requires_grad_()
    kappa_q, kappa_p = kappa.clone().requires_grad_(), kappa.clone().requires_grad_()
    kl = kl_divergence(VonMisesFisherStable(raw, kappa_q), VonMisesFisherStable(raw.detach(), kappa_p))
    assert bool((kl == 0).all())
    kl.sum().backward()
    for leaf in (raw, kappa_q, kappa_p):
        assert bool((leaf.grad == 0).all())


def test_kl_shapes_broadcast_and_spheres_of_other_dimensions_are_left_to_sampling():
    q, p = von_mises_fisher(3, 1, 5), von_mises_fisher(2, 5)
    uniform = HypersphericalUniform(5, (4, 1, 1), like=q.loc)
    assert kl_divergence(q, p).shape == (3, 2)
    assert kl_divergence(q, uniform).shape == (4, 3, 1)
    assert kl_divergence(uniform, p).shape == (4, 1, 2)
    assert kl_divergence(uniform, HypersphericalUniform(5, (2,))).shape == (4, 1, 2)
    other, plane = von_mises_fisher(6), HypersphericalUniform(2)
    for first, second in ((q, other), (q, plane), (plane, q), (plane, uniform)):
        with pytest.raises(NotImplementedError):
            kl_divergence(first, second)


def _draw_and_densities(raw, kappa):
    distribution = VonMisesFisherStable(normalize(raw, dim=-1), kappa, validate_args=False)
    value = distribution.rsample((2,))
    return value, distribution.log_prob(value), distribution.entropy()


# The compiler itself makes an instance of autograd.Function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@recent_compiler
def test_it_compiles_to_one_graph_with_its_gradients():
    raw, kappa = torch.randn(4, 64, requires_grad=True), torch.tensor([0.0, 1.0, 5.0, 30.0], requires_grad=True)
    compiled = torch.compile(_draw_and_densities, backend="aot_eager", fullgraph=True)
    results = []
    for function in (_draw_and_densities, compiled):
        pyro.set_rng_seed(0)
        outputs = function(raw, kappa)
        weights = torch.linspace(-1.0, 1.0, 64)
        total = (outputs[0] * weights).sum() + sum(output.sum() for output in outputs[1:])
        results.append([*outputs, *torch.autograd.grad(total, (raw, kappa))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dim", [2, 3, 40])
def test_it_batches_under_vmap_with_draws_and_gradients_of_its_own_for_each(dim):
    raw, kappa = torch.randn(1, dim).repeat(5, 1), torch.full((5,), 4.0)
    value, log_prob, entropy = torch.func.vmap(_draw_and_densities, randomness="different")(raw, kappa)
    distribution = VonMisesFisherStable(normalize(raw, dim=-1), kappa)
    assert value.shape == (5, 2, dim)
    assert not torch.equal(value[0], value[1])
    torch.testing.assert_close(log_prob.T, distribution.log_prob(value.transpose(0, 1)))
    torch.testing.assert_close(entropy, distribution.entropy())

    def total(raw, kappa):
        return _draw_and_densities(raw, kappa)[0][..., 0].sum()

    gradients = torch.func.vmap(torch.func.grad(total, argnums=(0, 1)), randomness="different")(raw, kappa)
    for gradient in gradients:
        assert bool(gradient.isfinite().all())
        assert not torch.equal(gradient[0], gradient[1])


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [2, 3, 500])
def test_on_cuda_nothing_waits_for_the_device(dim):
    raw = torch.randn(256, dim, device="cuda", requires_grad=True)
    kappa = torch.full((256,), float(dim), device="cuda", requires_grad=True)
    prior = VonMisesFisherStable(normalize(torch.randn(256, dim, device="cuda"), dim=-1), kappa.detach())

    def step():
        """A draw with its density, entropy, KLs and gradients."""
        distribution = VonMisesFisherStable(normalize(raw, dim=-1), kappa, validate_args=False)
        value = distribution.rsample()
        uniform = HypersphericalUniform(dim, like=raw, validate_args=False)
        terms = [
            distribution.log_prob(value),
            distribution.entropy(),
            kl_divergence(distribution, prior),
            kl_divergence(distribution, uniform),
        ]
        return torch.autograd.grad(value[..., 0].sum() + sum(term.sum() for term in terms), (raw, kappa))

    step()
    with waiting_is_an_error():
        step()


def test_infer_shapes_agrees_with_the_distribution():
    distribution = VonMisesFisherStable(unit(4, 1, 3), torch.ones(5, dtype=torch.double))
    shapes = VonMisesFisherStable.infer_shapes(loc=torch.Size((4, 1, 3)), concentration=torch.Size((5,)))
    assert shapes == (distribution.batch_shape, distribution.event_shape) == ((4, 5), (3,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("concentration", [1.0, bad, 2.0]) for bad in (-1.0, math.nan, math.inf)),
        *(("loc", bad) for bad in ([0.0, 0.0], [1.0, 1.0], [math.nan, 1.0], [0.0, 1.0001])),
    ],
)
def test_parameters_out_of_their_range_are_refused_by_name(name, value):
    arguments = {"loc": torch.eye(3), "concentration": 1.0, name: torch.tensor(value)}
    with pytest.raises(ValueError, match=name):
        VonMisesFisherStable(**arguments)
    VonMisesFisherStable(**arguments, validate_args=False)


def test_a_subclass_is_kept_by_expand_and_one_with_arguments_of_its_own_must_say_how():
    class Renamed(VonMisesFisherStable):
        pass

    class OfOneNumber(VonMisesFisherStable):
        def __init__(self, number):
            super().__init__(torch.eye(2), number)

    assert type(Renamed(torch.eye(2), 1.0).expand([4, 2])) is Renamed
    with pytest.raises(NotImplementedError, match="OfOneNumber"):
        OfOneNumber(1.0).expand([4, 2])
