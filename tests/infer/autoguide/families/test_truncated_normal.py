# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Truncated mean field: draws that keep near the mean, the KL of that posterior, and a training that finds it."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.optim import Adam

from pyro_radial import AutoMeanField, BayesianModule, PriorChain, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods
from tests.helpers.models import matrix_model, train_to_convergence

TRUNCATION = 0.8


def guide_of(model, truncation=TRUNCATION, **kwargs):
    return AutoMeanField(model, families={".": families.TruncatedNormal(truncation)}, **kwargs)


def test_the_kl_of_a_guide_is_that_of_quadrature_for_each_element():
    guide = guide_of(matrix_model, init_stddev=0.2)
    guide.setup()
    elbo = RadialELBO(strict_kl=True)
    elbo.loss(matrix_model, guide)
    for name, distribution in guide.posterior().items():
        own = distribution.base_dist
        expected = 0.0
        for loc, scale in zip(own.loc.flatten().tolist(), own.scale.flatten().tolist(), strict=True):
            q, p = stats.truncnorm(-TRUNCATION, TRUNCATION, loc, scale), stats.norm(0.0, 1.0)
            ends = loc - TRUNCATION * scale, loc + TRUNCATION * scale
            expected += integrate.quad(lambda w, q=q, p=p: q.pdf(w) * (q.logpdf(w) - p.logpdf(w)), *ends)[0]
        # A few dozen terms in single precision.
        assert float(elbo.terms.kl_by_site[name]) == pytest.approx(expected, rel=1e-5)


def test_draws_keep_within_the_truncation_and_start_as_wide_as_said():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 3)), likelihoods.Gaussian())
    guide = guide_of(model, init_stddev=0.12)
    guide.setup(torch.zeros(1, 2), torch.zeros(1, 3))
    weight = guide.posterior()["weight"]
    torch.testing.assert_close(weight.stddev, torch.full((3, 2), 0.12))
    draws = torch.stack([guide()["weight"] for _ in range(200)]).detach()
    assert float(((draws - weight.mean) / weight.base_dist.scale).abs().max()) <= TRUNCATION * (1 + 1e-5)


def test_alone_with_its_prior_it_finds_the_truncated_normal_nearest_to_it():
    """The KL to N(0, 1) is least where v sigma^2 = 1: at the standard deviation of the prior."""
    guide = guide_of(matrix_model)
    guide.setup()
    train_to_convergence(matrix_model, guide, num_steps=400, num_particles=1, max_plate_nesting=0)
    for distribution in guide.posterior().values():
        torch.testing.assert_close(distribution.mean, torch.zeros_like(distribution.mean), atol=0.02, rtol=0.0)
        torch.testing.assert_close(distribution.stddev, torch.ones_like(distribution.stddev), atol=0.02, rtol=0.0)


def test_a_constrained_site_has_its_pushforward():
    def model():
        pyro.sample("rate", dist.LogNormal(0.0, 1.0).expand([4]).to_event(1))

    guide = guide_of(model, init_stddev=0.5)
    guide.setup()
    assert RadialELBO(strict_kl=True).loss(model, guide) > 0
    low, middle, high = guide.quantiles([1e-6, 0.5, 1 - 1e-6])["rate"].log()
    scale = 0.5 / math.sqrt(stats.truncnorm(-TRUNCATION, TRUNCATION).var())
    torch.testing.assert_close(high - middle, torch.full((4,), TRUNCATION * scale), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(middle - low, high - middle, rtol=1e-4, atol=0.0)


def test_it_is_trained_by_fit_and_predicts():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(scale=0.1))
    x = torch.randn(50, 2)
    guide = guide_of(model)
    result = fit(model, guide, (x, x.sum(-1)), epochs=3, seed=0, progress=False)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert predict(model, guide, x, 4).samples.shape == (4, 50, 1)


def test_a_chain_takes_the_normal_of_its_moments():
    chain = PriorChain(SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian()))
    x = torch.randn(20, 2)
    for _ in range(2):
        guide = chain.guide(guide_of)
        result = fit(chain, guide, (x, x.sum(-1)), epochs=20, optim=partial(Adam, lr=0.03), seed=0, progress=False)
        chain.advance(guide)
    assert math.isfinite(result.history[-1]["loss"])
    exact = PriorChain(SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian()), form="exact")
    with pytest.raises(ValueError, match=r"new prior of site 'weight'.* gives zero density"):
        exact.advance(guide)


def test_local_reparameterization_is_refused_by_name():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(), local_reparameterization=True)
    with pytest.raises(ValueError, match="site 'weight' must have a normal or a radial posterior, got TruncatedNormal"):
        fit(model, guide_of(model), (torch.zeros(4, 2), torch.zeros(4, 1)), epochs=1, progress=False)


@pytest.mark.parametrize("arguments", [(0.0,), (math.inf,), (None,), (1.0, -1.0)])
def test_numbers_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match="must be a positive finite number"):
        families.TruncatedNormal(*arguments)
