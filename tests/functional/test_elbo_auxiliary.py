# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The ELBO of functions with guides that have auxiliary sites, on functions whose posterior is known."""

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField
from pyro_radial.functional import FunctionalELBO, GaussianKL, GaussianProcess, LinearizedKL, SteinKL
from pyro_radial.functional.guide_process import sites_led_to

NUM_FEATURES, NUM_INPUTS, NOISE = 40, 6, 0.3
GENERATOR = torch.Generator().manual_seed(0)
# As many points as features, so that the divergence of functions is that of weights, whose posterior is known.
X = torch.randn(NUM_FEATURES, NUM_INPUTS, generator=GENERATOR, dtype=torch.float64)
Y = torch.sin(2 * X[:, 0]) + NOISE * torch.randn(NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)
FREQUENCY = torch.randn(NUM_INPUTS, NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)
PHASE = 2 * math.pi * torch.rand(NUM_FEATURES, generator=GENERATOR, dtype=torch.float64)


def features(x):
    return (x @ FREQUENCY + PHASE).cos() * (2 / NUM_FEATURES) ** 0.5


def linear_model(x, y=None):
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(NUM_FEATURES), 1.0).to_event(1))
    f = weight.reshape(-1, NUM_FEATURES) @ features(x).T
    f = f[0] if weight.dim() == 1 else f
    with pyro.plate("data", len(x), dim=-1):
        pyro.deterministic("f", f)
        pyro.sample("y", dist.Normal(f, NOISE), obs=y)


PHI = features(X)
PRECISION = PHI.T @ PHI / NOISE**2 + torch.eye(NUM_FEATURES, dtype=torch.float64)


# What full covariances start at, times the exact standard deviations. Factorized ones, of 0.26 to 0.33, start at 0.2.
START = 0.7


class FullNormal(nn.Module):
    """A normal over all weights, sampled directly."""

    def __init__(self, model):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(NUM_FEATURES, dtype=torch.float64))
        self.factor = nn.Parameter(START * torch.linalg.cholesky(PRECISION.inverse()))

    def forward(self, x, y=None):
        covariance = self.factor @ self.factor.T
        pyro.sample("weight", dist.MultivariateNormal(self.loc, covariance))


def full_auxiliary():
    guide = AutoMultivariateNormal(linear_model)
    guide(X, Y)
    factor = START * torch.linalg.cholesky(PRECISION.inverse())
    guide.scale = factor.diagonal()
    guide.scale_tril = factor / factor.diagonal()[:, None]
    return guide


#: Guides by what of the posterior each can have: all of its covariance, or the diagonal of its precision.
GUIDES = {
    "full": lambda: FullNormal(linear_model),
    "AutoMultivariateNormal": full_auxiliary,
    "AutoNormal": lambda: AutoNormal(linear_model, init_scale=0.2),
    "AutoMeanField": lambda: AutoMeanField(linear_model, init_stddev=0.2),
}


def trained(name, divergence, steps=200):
    """A guide trained with a rate that falls to zero, and the loss."""
    pyro.set_rng_seed(0)
    guide = GUIDES[name]()
    prior = GaussianProcess(lambda a, b: features(a) @ features(b).T)
    elbo = FunctionalELBO(prior, divergence=divergence, num_functions=300)
    loss = elbo(linear_model, guide)
    loss(X, Y)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) ** 3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(X, Y).backward()
        optimizer.step()
        scheduler.step()
    return guide, elbo


@torch.no_grad()
def covariance_of(guide):
    pyro.set_rng_seed(1)
    if isinstance(guide, FullNormal):
        return guide.factor @ guide.factor.T
    if isinstance(guide, AutoMultivariateNormal):
        return guide.get_posterior().covariance_matrix
    scales = guide.scales.weight if isinstance(guide, AutoNormal) else guide.posterior()["weight"].stddev
    return scales.square().diag()


# Each guide once, and each divergence.
CASES = [
    ("AutoMultivariateNormal", GaussianKL()),
    ("AutoNormal", LinearizedKL()),
    ("full", SteinKL()),
    ("AutoMeanField", LinearizedKL()),
]


@pytest.mark.parametrize(("name", "divergence"), CASES, ids=[f"{name}-{type(d).__name__}" for name, d in CASES])
def test_training_ends_at_the_standard_deviations_of_the_exact_posterior(name, divergence):
    guide, elbo = trained(name, divergence)
    full = name in ("full", "AutoMultivariateNormal")
    exact = PRECISION.inverse() if full else PRECISION.diagonal().reciprocal().diag()
    found = covariance_of(guide)
    of_weights = (found.diagonal() / exact.diagonal()).sqrt() - 1
    of_functions = ((PHI @ found @ PHI.T).diagonal() / (PHI @ exact @ PHI.T).diagonal()).sqrt() - 1
    assert of_weights.abs().max() < 0.03
    assert of_functions.abs().max() < 0.03
    # An auxiliary site that leads to the function alone is no term of the loss.
    assert list(elbo.terms.kl_by_site) == ["f"]


def noisy_model(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    f = weight.reshape(-1, 1, 3) @ x.T
    f = f[0, 0] if weight.dim() == 1 else f.squeeze(1)
    noise = pyro.sample("noise", dist.LogNormal(0.3, 0.5))
    with pyro.plate("data", len(x), dim=-1):
        pyro.deterministic("f", f)
        pyro.sample("y", dist.Normal(f, noise), obs=y)


def functional_elbo(num_functions=50):
    prior = GaussianProcess(lambda a, b: a @ b.T, noise=0.1)
    return FunctionalELBO(prior, divergence=GaussianKL(), num_functions=num_functions)


class TestSitesBesideTheFunction:
    data = (torch.randn(8, 3, generator=GENERATOR), torch.randn(8, generator=GENERATOR))

    def test_their_auxiliary_sites_count_with_them(self):
        """The terms of the noise are its KL, as the guide without auxiliary sites has it in closed form."""
        guide = AutoNormal(noisy_model, init_scale=0.2)
        elbo = functional_elbo(5_000)
        pyro.set_rng_seed(0)
        elbo(noisy_model, guide)(*self.data).backward()
        kls = elbo.terms.kl_by_site
        assert set(kls) == {"f", "noise", "noise_unconstrained"}
        loc, scale = guide.locs.noise.detach(), guide.scales.noise.detach()
        exact = torch.distributions.kl_divergence(dist.Normal(loc, scale), dist.Normal(0.3, 0.5))
        # Its draws have a standard deviation of about one.
        assert kls["noise"] + kls["noise_unconstrained"] == pytest.approx(float(exact), abs=4 / 5_000**0.5)

    @pytest.mark.parametrize("guide", [AutoMultivariateNormal, AutoDiagonalNormal])
    def test_an_auxiliary_site_that_leads_to_both_is_refused_with_what_to_do(self, guide):
        words = rf"apart from .* '_{guide.__name__}_latent' that leads to both .* AutoGuideList"
        with pytest.raises(ValueError, match=words):
            functional_elbo()(noisy_model, guide(noisy_model))(*self.data)

    def test_guides_of_their_own_are_what_to_do(self):
        guide = AutoGuideList(noisy_model)
        guide.append(AutoMultivariateNormal(poutine.block(noisy_model, hide=["noise"])))
        guide.append(AutoMeanField(poutine.block(noisy_model, expose=["noise"])))
        elbo = functional_elbo()
        elbo(noisy_model, guide)(*self.data).backward()
        assert set(elbo.terms.kl_by_site) == {"f", "noise"}


def test_an_auxiliary_site_leads_through_others():
    def guide():
        first = pyro.sample("first", dist.Normal(torch.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True})
        second = pyro.sample("second", dist.Normal(first[0], 1.0), infer={"is_auxiliary": True})
        pyro.sample("alone", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        pyro.sample("w", dist.Delta(second.exp()))
        pyro.sample("v", dist.Normal(first[1], 1.0))
        pyro.sample("u", dist.Normal(0.0, 1.0))

    found = sites_led_to(guide, ["first", "second", "alone"], (), {})
    assert found == {"first": {"w", "v"}, "second": {"w"}, "alone": set()}
