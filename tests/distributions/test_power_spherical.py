# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import mpmath
import numpy as np
import pyro
import pytest
import torch
from scipy import stats
from torch.distributions import kl_divergence
from torch.nn.functional import normalize

from pyro_radial.distributions import HypersphericalUniform, PowerSpherical, VonMisesFisherStable
from pyro_radial.distributions.special import log_sphere_area
from tests.helpers.compilers import recent_compiler
from tests.helpers.spheres import sphere_points

NUM_SAMPLES = 20_000
CONCENTRATIONS = [0.0, 1e-30, 1e-6, 1e-3, 1.0, 30.0, 1e4, 1e6]


def unit(*shape, dtype=torch.double):
    return normalize(torch.randn(shape, dtype=dtype), dim=-1)


def power_spherical(*shape, concentration=5.0, dtype=torch.double):
    return PowerSpherical(unit(*shape, dtype=dtype), torch.tensor(concentration, dtype=dtype))


def within(draws, expected, errors=4.0):
    return bool(((draws.mean(0) - expected).abs() <= errors * draws.std(0) / len(draws) ** 0.5).all())


@pytest.mark.parametrize(("dim", "concentration"), [(2, 0.5), (2, 40.0), (3, 7.0), (10, 0.5), (50, 200.0)])
def test_the_constant_the_moments_and_the_entropy_are_their_integrals(dim, concentration):
    distribution = power_spherical(dim, concentration=concentration)
    loc = distribution.loc

    # In the angle to the mean nothing has a pole.
    def integral(function):
        def integrand(angle):
            cosine = mpmath.cos(angle)
            return function(cosine) * (1 + cosine) ** concentration * mpmath.sin(angle) ** (dim - 2)

        return mpmath.quad(integrand, [0, 0.3, 1, 2, mpmath.pi])

    total = integral(lambda cosine: 1)
    log_normalizer = float(mpmath.log(total)) + (log_sphere_area(dim - 1) if dim > 2 else math.log(2.0))
    value = unit(5, dim)
    expected = concentration * (value @ loc).log1p() - log_normalizer
    torch.testing.assert_close(distribution.log_prob(value), expected, rtol=1e-11, atol=1e-11)
    mean = float(integral(lambda cosine: cosine) / total)
    square = float(integral(lambda cosine: cosine**2) / total)
    torch.testing.assert_close(distribution.mean, mean * loc, rtol=0, atol=1e-12)
    across = (1.0 - square) / (dim - 1)
    exact = loc.square() * (square - mean**2) + (1.0 - loc.square()) * across
    torch.testing.assert_close(distribution.variance, exact, rtol=0, atol=1e-12)
    # The logarithm's pole is where the density has no mass.
    mean_log = float(integral(lambda cosine: mpmath.log(1 + cosine) if cosine > -1 else 0) / total)
    assert float(distribution.entropy()) == pytest.approx(log_normalizer - concentration * mean_log, abs=1e-10)


@pytest.mark.parametrize("dim", [2, 3, 50, 1000, 10**5])
def test_constants_are_those_of_high_precision_at_any_concentration(dim):
    beta, kappas = mpmath.mpf(dim - 1) / 2, [1e-9, 1e-3, 0.7, 30.0, 0.49 * dim, 0.51 * dim, 1e4, 1e6]
    concentration = torch.tensor(kappas, dtype=torch.double)
    loc = unit(dim)
    distribution, uniform = PowerSpherical(loc, concentration), HypersphericalUniform(dim, like=loc)
    peak, to_uniform, from_uniform = [], [], []
    with mpmath.workdps(50):
        rise = mpmath.loggamma(2 * beta) - mpmath.loggamma(beta)
        for kappa in map(mpmath.mpf, kappas):
            alpha = beta + kappa
            log_mean = rise - mpmath.loggamma(alpha + beta) + mpmath.loggamma(alpha)
            slope = mpmath.digamma(alpha) - mpmath.digamma(alpha + beta)
            flat = mpmath.digamma(beta) - mpmath.digamma(2 * beta)
            peak.append(float(-log_mean))
            to_uniform.append(float(kappa * slope - log_mean))
            from_uniform.append(float(log_mean - kappa * flat))
    peak, to_uniform, from_uniform = (torch.tensor(v, dtype=torch.double) for v in (peak, to_uniform, from_uniform))
    area = log_sphere_area(dim)
    torch.testing.assert_close(distribution.log_prob(loc) + area, peak, rtol=1e-13, atol=1e-15 * (abs(area) + 1.0))
    torch.testing.assert_close(kl_divergence(distribution, uniform), to_uniform, rtol=3e-11, atol=0)
    torch.testing.assert_close(kl_divergence(uniform, distribution), from_uniform, rtol=3e-11, atol=0)
    torch.testing.assert_close(distribution.entropy(), area - to_uniform, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [2, 3])
def test_kl_is_its_integral_over_the_sphere(dim):
    q = power_spherical(dim, concentration=4.0)
    p, uniform = VonMisesFisherStable(unit(dim), 1.5), HypersphericalUniform(dim, like=q.loc)
    points, weights = sphere_points(dim)
    for other in (p, uniform):
        log_ratio = q.log_prob(points) - other.log_prob(points)
        exact = (weights * q.log_prob(points).exp() * log_ratio).sum()
        torch.testing.assert_close(kl_divergence(q, other), exact, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dim", [2, 3, 500])
def test_kl_to_a_von_mises_fisher_is_not_negative_and_zero_between_uniforms(dim):
    kappa = torch.tensor([0.0, *np.geomspace(1e-6, 1e6, 40)], dtype=torch.float)
    loc = unit(1, dim, dtype=torch.float)
    for factor in (0.0, 0.5, 0.7, 1.0, 2.0, 100.0):
        kl = kl_divergence(PowerSpherical(loc, kappa), VonMisesFisherStable(loc, kappa * factor))
        assert bool((kl >= 0).all())
        assert float(kl[0]) == 0.0
        opposite = kl_divergence(PowerSpherical(loc, kappa), VonMisesFisherStable(-loc, kappa * factor))
        assert bool((opposite >= kl).all())


def test_kl_shapes_broadcast_and_pairs_without_a_closed_form_are_left_to_sampling():
    q, p = power_spherical(3, 1, 5), VonMisesFisherStable(unit(2, 5), 2.0)
    uniform = HypersphericalUniform(5, (4, 1, 1), like=q.loc)
    assert kl_divergence(q, p).shape == (3, 2)
    assert kl_divergence(q, uniform).shape == kl_divergence(uniform, q).shape == (4, 3, 1)
    rows = HypersphericalUniform(5, (3, 1)).to_event(2)
    torch.testing.assert_close(kl_divergence(q.to_event(2), rows), kl_divergence(q, uniform)[0].sum())
    other, plane = power_spherical(3, 1, 5), HypersphericalUniform(2)
    for first, second in ((q, other), (p, q), (q, plane), (plane, q), (q, VonMisesFisherStable(unit(6), 1.0))):
        with pytest.raises(NotImplementedError):
            kl_divergence(first, second)


def test_concentration_zero_is_the_uniform_distribution():
    distribution = power_spherical(4, 7, concentration=0.0)
    uniform = HypersphericalUniform(7, (4,), like=torch.zeros(()).double())
    value = uniform.sample()
    torch.testing.assert_close(distribution.log_prob(value), uniform.log_prob(value), rtol=1e-14, atol=0)
    torch.testing.assert_close(distribution.log_prob(-distribution.loc), uniform.log_prob(value), rtol=1e-14, atol=0)
    torch.testing.assert_close(distribution.entropy(), uniform.entropy(), rtol=1e-15, atol=0)
    torch.testing.assert_close(distribution.mean, uniform.mean)
    torch.testing.assert_close(distribution.variance, uniform.variance)


def test_opposite_to_the_mean_the_density_is_zero_with_zero_gradient_and_near_it_keeps_its_digits():
    loc = torch.tensor([0.6, 0.8]).requires_grad_()
    kappa = torch.tensor(3.0, requires_grad=True)
    distribution = PowerSpherical(loc, kappa)
    opposite = distribution.log_prob(-loc.detach())
    assert opposite.item() == -math.inf
    for gradient in torch.autograd.grad(opposite, (loc, kappa)):
        assert bool((gradient == 0).all())
    angle = 1e-5
    near = torch.tensor([-math.cos(angle), math.sin(angle)], dtype=torch.double)
    exact = PowerSpherical(torch.tensor([1.0, 0.0], dtype=torch.double), 3.0)
    expected = 3.0 * (math.log(2.0) + 2.0 * math.log(math.sin(0.5 * angle))) - 3.0 * math.log(2.0)
    difference = exact.log_prob(near) - exact.log_prob(exact.loc)
    assert float(difference) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("dim", [2, 3, 10, 1000])
def test_nothing_is_nan_or_infinite_at_any_concentration(dim, dtype):
    raw = torch.randn(len(CONCENTRATIONS), dim, dtype=dtype, requires_grad=True)
    kappa = torch.tensor(CONCENTRATIONS, dtype=dtype, requires_grad=True)
    distribution = PowerSpherical(normalize(raw, dim=-1), kappa)
    other, uniform = VonMisesFisherStable(unit(len(CONCENTRATIONS), dim, dtype=dtype), 3.0), HypersphericalUniform(dim)
    value = distribution.rsample()
    scalars = [distribution.log_prob(value), distribution.log_prob(other.sample()), distribution.entropy()]
    scalars += [distribution.mean, distribution.variance, value * torch.randn_like(value)]
    scalars += [kl_divergence(distribution, uniform), kl_divergence(uniform, distribution)]
    scalars.append(kl_divergence(distribution, other))
    for scalar in scalars:
        assert bool(scalar.isfinite().all())
        first = torch.autograd.grad(scalar.sum(), (raw, kappa), create_graph=True, allow_unused=True)
        assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in first)
        again = [g.sum() for g in first if g is not None and g.requires_grad]
        second = torch.autograd.grad(sum(again), (raw, kappa), allow_unused=True, retain_graph=True) if again else ()
        assert all(gradient is None or bool(gradient.isfinite().all()) for gradient in second)


@pytest.mark.parametrize("dim", [2, 3, 10, 500])
def test_gradients_of_density_entropy_and_kl_match_differences(dim):
    value, raw = unit(3, dim), torch.randn(3, dim, dtype=torch.double, requires_grad=True)
    kappa = torch.tensor([0.3, 5.0, 300.0], dtype=torch.double, requires_grad=True)
    prior, uniform = VonMisesFisherStable(unit(3, dim), 2.0), HypersphericalUniform(dim, like=raw)

    def scalars(raw, kappa):
        distribution = PowerSpherical(normalize(raw, dim=-1), kappa, validate_args=False)
        kls = (kl_divergence(distribution, prior), kl_divergence(uniform, distribution))
        return distribution.log_prob(value), distribution.entropy(), *kls

    assert torch.autograd.gradcheck(scalars, (raw, kappa), fast_mode=True)
    assert torch.autograd.gradgradcheck(scalars, (raw, kappa), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize(("dim", "concentration"), [(2, 0.3), (2, 1e6), (3, 4.0), (10, 1e4), (50, 60.0), (1000, 900.0)])
def test_the_cosine_has_its_distribution(dim, concentration, dtype):
    loc = torch.zeros(dim, dtype=dtype)
    loc[-1] = 1.0
    count = min(NUM_SAMPLES, 5 * 10**6 // dim)
    draws = PowerSpherical(loc, concentration).sample((count,)).double()
    # Half of the squared distance is 1 - cosine, to the last digit.
    gap = (draws - loc.double()).square().sum(-1).numpy() / 4.0
    beta = 0.5 * (dim - 1)
    assert stats.kstest(gap, stats.beta(beta, beta + concentration).cdf).pvalue > 1e-3
    assert float((draws.norm(dim=-1) - 1.0).abs().max()) < (1e-6 if dtype == torch.float else 1e-14)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("distance", [0.0, 1e-7, 1e-3])
def test_draws_are_around_a_mean_near_the_first_axis_and_opposite_to_it(distance, sign, dtype):
    dim = 1000
    loc = distance * torch.randn(dim, dtype=torch.double) / dim**0.5
    loc[0] = sign
    loc = normalize(loc, dim=-1).to(dtype)
    distribution = PowerSpherical(loc, 2000.0)
    draws = distribution.sample((2000,))
    centered = draws - distribution.mean
    # A thousand comparisons at once.
    assert within(centered, torch.zeros(dim, dtype=dtype), errors=5.0)
    assert within(centered.square(), distribution.variance, errors=5.0)


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize(("dim", "concentration"), [(2, 1.5), (3, 4.0), (5, 0.0), (30, 40.0), (1000, 500.0)])
def test_the_gradient_of_an_expectation_over_draws_is_unbiased(dim, concentration, dtype):
    # E (a . x)^2 has the closed form below, from the moments of the distribution.
    count = min(NUM_SAMPLES, 4 * 10**6 // dim)
    a, raw = torch.randn(dim, dtype=dtype), torch.randn(dim, dtype=dtype)
    kappa = torch.full((count,), concentration, dtype=dtype, requires_grad=True)
    rows = raw.repeat(count, 1).requires_grad_()
    value = PowerSpherical(normalize(rows, dim=-1), kappa).rsample()
    draws = [g.double() for g in torch.autograd.grad((value @ a).square().sum(), (rows, kappa))]
    raw, a = raw.double().requires_grad_(), a.double()
    one = torch.tensor(concentration, dtype=torch.double, requires_grad=True)
    loc, total = normalize(raw, dim=-1), one + (dim - 1)
    across = (2.0 * one + (dim - 1)) / (total * (total + 1.0))
    square = (one / total).square() + across * (dim - 1) / total
    exact = across * a @ a + (square - across) * (a @ loc).square()
    for draw, gradient in zip(draws, torch.autograd.grad(exact, (raw, one)), strict=True):
        assert within(draw, gradient, errors=4.0 if dim < 100 else 5.0)


@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.0), (3, 0.7), (50, 20.0), (500, 500.0)])
def test_two_derivatives_of_the_mean_cosine_are_unbiased(dim, kappa):
    concentration = torch.full((NUM_SAMPLES // 10,), kappa, dtype=torch.double, requires_grad=True)
    loc = torch.eye(1, dim, dtype=torch.double)[0]
    cosine = PowerSpherical(loc, concentration).rsample()[..., 0]
    (first,) = torch.autograd.grad(cosine.sum(), concentration, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), concentration)
    total = kappa + dim - 1
    assert within(first.detach(), (dim - 1) / total**2)
    assert within(second, -2.0 * (dim - 1) / total**3)


@pytest.mark.parametrize("dim", [2, 50])
def test_an_empty_batch_has_empty_results(dim):
    kappa = torch.ones(0, requires_grad=True)
    distribution, prior = PowerSpherical(torch.zeros(0, dim), kappa), VonMisesFisherStable(torch.zeros(0, dim), 1.0)
    value = distribution.rsample((2,))
    assert value.shape == (2, 0, dim)
    assert distribution.log_prob(value).shape == (2, 0)
    for result in (distribution.entropy(), kl_divergence(distribution, prior), value.sum((0, 2))):
        assert result.shape == (0,)
        (gradient,) = torch.autograd.grad(result.sum(), kappa)
        assert gradient.shape == (0,)


def _draw_and_densities(raw, kappa):
    distribution = PowerSpherical(normalize(raw, dim=-1), kappa, validate_args=False)
    value = distribution.rsample((2,))
    return value, distribution.log_prob(value), distribution.entropy()


# The compiler itself makes an instance of autograd.Function, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@recent_compiler
def test_it_compiles_to_one_graph_with_its_gradients():
    raw, kappa = torch.randn(4, 41, requires_grad=True), torch.tensor([0.0, 1.0, 5.0, 30.0], requires_grad=True)
    compiled = torch.compile(_draw_and_densities, backend="aot_eager", fullgraph=True)
    results = []
    for function in (_draw_and_densities, compiled):
        pyro.set_rng_seed(0)
        outputs = function(raw, kappa)
        total = (outputs[0] * torch.linspace(-1.0, 1.0, 41)).sum() + sum(output.sum() for output in outputs[1:])
        results.append([*outputs, *torch.autograd.grad(total, (raw, kappa))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dim", [2, 40])
def test_it_batches_under_vmap_with_draws_and_gradients_of_its_own_for_each(dim):
    raw, kappa = torch.randn(1, dim).repeat(5, 1), torch.full((5,), 4.0)
    value, log_prob, entropy = torch.func.vmap(_draw_and_densities, randomness="different")(raw, kappa)
    distribution = PowerSpherical(normalize(raw, dim=-1), kappa)
    assert not torch.equal(value[0], value[1])
    torch.testing.assert_close(log_prob.T, distribution.log_prob(value.transpose(0, 1)))
    torch.testing.assert_close(entropy, distribution.entropy())

    def total(raw, kappa):
        return _draw_and_densities(raw, kappa)[0][..., 0].sum()

    for gradient in torch.func.vmap(torch.func.grad(total, argnums=(0, 1)), randomness="different")(raw, kappa):
        assert bool(gradient.isfinite().all())
        assert not torch.equal(gradient[0], gradient[1])


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [2, 500])
def test_on_cuda_nothing_waits_for_the_device(dim):
    raw = torch.randn(256, dim, device="cuda", requires_grad=True)
    kappa = torch.full((256,), float(dim), device="cuda", requires_grad=True)
    prior = VonMisesFisherStable(normalize(torch.randn(256, dim, device="cuda"), dim=-1), kappa.detach())
    uniform = HypersphericalUniform(dim, like=raw, validate_args=False)

    def step():
        distribution = PowerSpherical(normalize(raw, dim=-1), kappa, validate_args=False)
        value = distribution.rsample()
        terms = [distribution.log_prob(value), distribution.entropy(), value[..., 0]]
        terms += [kl_divergence(distribution, prior), kl_divergence(distribution, uniform)]
        return torch.autograd.grad(sum(term.sum() for term in terms), (raw, kappa))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
