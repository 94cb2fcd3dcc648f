# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from mpmath import MPContext
from scipy import stats
from scipy.integrate import quad
from torch.distributions import biject_to, kl_divergence

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.half_cauchy import half_cauchy_factors, log_mode, sqrt_product
from tests.helpers.distributions import assert_kl_is_that_of_samples

NUM_SAMPLES = 4_000
TARGETS = {"gamma": dist.Gamma, "inverse gamma": dist.InverseGamma}


def double(value):
    return torch.tensor(value, dtype=torch.double)


@pytest.mark.parametrize(("scale", "value"), [(0.3, 0.05), (1.0, 1.0), (1.0, 7.0), (20.0, 3.0)])
def test_the_density_of_the_pair_integrates_to_that_of_the_half_cauchy(scale, value):
    gamma, inverse_gamma = half_cauchy_factors(double(scale))

    # At a = e^t, and b = value^2 / a with db = 2 value / a d value.
    def integrand(t):
        a = double(t).exp()
        log_joint = gamma.log_prob(a) + inverse_gamma.log_prob(value**2 / a)
        return float(log_joint.exp() * 2 * value)

    total, _ = quad(integrand, -40, 40, points=[2 * math.log(scale), 2 * math.log(value)], epsabs=1e-12)
    assert total == pytest.approx(float(dist.HalfCauchy(double(scale)).log_prob(double(value)).exp()), rel=1e-7)


def test_a_scale_that_is_not_positive_is_refused_by_name():
    with pytest.raises(ValueError, match="scale"):
        half_cauchy_factors(torch.tensor([1.0, 0.0]))


def exact_kl(loc, scale, concentration, rate, sign):
    """By quadrature over log w, where log p is that of the gamma at +log w or of the inverse gamma at -log w."""
    context = MPContext()
    context.dps = 30
    loc, scale, a, b = (context.mpf(x) for x in (loc, scale, concentration, rate))

    def integrand(z):
        x = sign * (loc + scale * z)
        log_q = context.log(context.npdf(z)) - context.log(scale)
        log_p = a * context.log(b) - context.loggamma(a) + a * x - b * context.exp(x)
        return context.npdf(z) * (log_q - log_p)

    peak = sign * scale  # of the exponential's integrand
    return float(context.quad(integrand, sorted([-30, -8, 0, 8, 30, peak])))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("loc", "scale", "concentration", "rate"),
    [(-1.0, 0.45, 0.5, 100.0), (0.3, 1.2, 0.5, 1.0), (2.0, 0.05, 3.0, 0.7), (-4.0, 2.0, 0.1, 0.01)],
)
def test_kl_of_a_log_normal_is_that_of_quadrature(target, loc, scale, concentration, rate):
    value = kl_divergence(
        dist.LogNormal(double(loc), double(scale)), TARGETS[target](double(concentration), double(rate))
    )
    expected = exact_kl(loc, scale, concentration, rate, 1 if target == "gamma" else -1)
    assert float(value) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("target", TARGETS)
def test_kl_has_the_gradients_of_differences_and_is_never_negative(target):
    parameters = [torch.randn(5, dtype=torch.double).requires_grad_()]
    parameters += [(0.2 + torch.rand(5, dtype=torch.double)).requires_grad_() for _ in range(3)]

    def kl(loc, scale, concentration, rate):
        return kl_divergence(dist.LogNormal(loc, scale), TARGETS[target](concentration, rate))

    assert bool((kl(*parameters) > 0).all())
    assert torch.autograd.gradcheck(kl, parameters)


@pytest.mark.parametrize("target", TARGETS)
def test_kl_and_its_gradients_are_right_in_float32_far_out(target):
    grid = torch.tensor(list(itertools.product([-40.0, -1.0, 0.0, 40.0], [1e-6, 1e-2, 1.0])), requires_grad=True)
    for rate in (1e-6, 1.0, 1e4):
        low = kl_divergence(dist.LogNormal(grid[:, 0], grid[:, 1]), TARGETS[target](torch.tensor(0.5), rate))
        wide = grid.double()
        high = kl_divergence(dist.LogNormal(wide[:, 0], wide[:, 1]), TARGETS[target](double(0.5), double(rate)))
        assert bool(low.isfinite().all())
        # An error of half a unit in the last place of t = loc + log(rate), of size 50, is 2e-6 in e^t.
        torch.testing.assert_close(low.double(), high, rtol=2e-5, atol=1e-5)
        assert bool(torch.autograd.grad(low.sum(), grid)[0].isfinite().all())


FULL = (3, 4, 2)


@pytest.fixture
def base():
    return dist.Normal(torch.randn(FULL, dtype=torch.double), 0.3 + torch.rand(FULL, dtype=torch.double))


@pytest.fixture(params=TARGETS.values(), ids=TARGETS.keys())
def target(request):
    return request.param(0.5 + torch.rand(FULL, dtype=torch.double), 0.5 + torch.rand(FULL, dtype=torch.double))


def pushforward(distribution, support):
    """What an automatic guide makes of a normal distribution on a positive site."""
    return dist.TransformedDistribution(distribution, [biject_to(support).with_cache()], validate_args=False)


MASK = torch.tensor([True, False, True])
NESTINGS = {
    "independent": lambda q, p: (dist.LogNormal(q.loc, q.scale).to_event(1).to_event(1), p.to_event(2)),
    "a pushforward without an event": lambda q, p: (pushforward(q, p.support), p),
    "a pushforward of an event": lambda q, p: (pushforward(q.to_event(2), p.to_event(2).support), p.to_event(2)),
    "an event of a pushforward": lambda q, p: (
        pushforward(q.to_event(1), p.to_event(1).support).to_event(1),
        p.to_event(2),
    ),
    "both masked": lambda q, p: (pushforward(q.to_event(2), p.support).mask(MASK), p.to_event(2).mask(MASK)),
    "expanded prior": lambda q, p: (
        pushforward(q.to_event(2), p.support),
        type(p)(p.concentration[0, 0, 0], p.rate[0, 0, 0]).expand([4, 2]).to_event(2).expand([3]),
    ),
    "generally expanded prior": lambda q, p: (
        pushforward(q.to_event(2), p.support),
        dist.torch_distribution.ExpandedDistribution(type(p)(p.concentration[0], p.rate[0]).to_event(2), (3,)),
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS.values(), ids=NESTINGS.keys())
def test_kl_is_that_of_samples_under_any_nesting(nesting, base, target):
    assert_kl_is_that_of_samples(*nesting(base, target))


def test_what_has_no_closed_form_is_left_to_sampling(base, target):
    radial = RadialNormal(base.loc, base.scale, 2)
    for q, p in (
        (pushforward(radial, target.support), target.to_event(2)),
        (dist.TransformedDistribution(base, [dist.transforms.SoftplusTransform()]), target),
        (dist.LogNormal(base.loc, base.scale), dist.HalfCauchy(target.rate)),
        (base, dist.LogNormal(base.loc, base.scale)),
        (base, dist.TransformedDistribution(base, [dist.transforms.ExpTransform().inv])),
        (base, dist.TransformedDistribution(target, [dist.transforms.AffineTransform(1.0, 2.0)])),
        (pushforward(base.to_event(2), target.support), target.to_event(1)),
        # A mask on one side leaves that side's Jacobian, which does not cancel.
        (pushforward(base, target.support), target.mask(True)),
    ):
        with pytest.raises(NotImplementedError):
            kl_divergence(q, p)


def test_the_root_of_the_product_of_log_normals_is_log_normal():
    first = dist.LogNormal(torch.randn(3, 1, dtype=torch.double), double(0.7))
    second = dist.LogNormal(double(-0.4), 0.2 + torch.rand(2, dtype=torch.double))
    distribution = sqrt_product(first, second)
    assert distribution.batch_shape == (3, 2)
    draws = (first.expand([3, 2]).sample((NUM_SAMPLES,)) * second.expand([3, 2]).sample((NUM_SAMPLES,))).sqrt().log()
    standard = (draws - distribution.loc) / distribution.scale
    assert stats.kstest(standard.flatten().numpy(), "norm").pvalue > 1e-3


def test_the_log_mode_is_where_the_density_is_largest():
    first, second = dist.LogNormal(double(1.0), double(0.6)), dist.LogNormal(double(-0.3), double(0.9))
    distribution = sqrt_product(first, second)
    torch.testing.assert_close(log_mode(distribution), double((1.0 - 0.3) / 2 - (0.36 + 0.81) / 4))
    torch.testing.assert_close(log_mode(distribution).exp(), distribution.mode)
    grid = distribution.mode * torch.linspace(0.5, 2.0, 1501, dtype=torch.double)
    assert float(grid[distribution.log_prob(grid).argmax()]) == pytest.approx(float(distribution.mode), rel=1e-3)
