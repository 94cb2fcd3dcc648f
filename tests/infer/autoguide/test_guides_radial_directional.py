# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The guide of directions and radii, where the generic tests of guides do not reach."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn
from torch.distributions import kl_divergence

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule, PriorChain, TermsELBO
from pyro_radial.distributions import HypersphericalUniform, RadialNormal, VonMisesFisherStable
from pyro_radial.infer.autoguide import families
from pyro_radial.nn.priors import RadialDirectionalPrior


def mixed_model():
    """A direction in R^4 for each of three groups, a positive site and a vector."""
    pyro.sample("direction", HypersphericalUniform(4).expand([3]).to_event(1))
    pyro.sample("radius", dist.Gamma(0.5, 2.0).expand([3]).to_event(1))
    pyro.sample("bias", dist.Normal(0.0, 1.0).expand([5]).to_event(1))


def network():
    return BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior("row"))


class TestPosterior:
    def test_each_kind_of_site_has_its_own_distribution(self):
        guide = AutoRadialDirectional(mixed_model, init_stddev=0.3)
        guide.setup()
        posterior = guide.posterior()
        assert isinstance(posterior["direction"].base_dist, VonMisesFisherStable)
        radius = posterior["radius"]
        log_normal = dist.LogNormal(radius.base_dist.mean, 0.3).to_event(1)
        value = radius.sample()
        torch.testing.assert_close(radius.log_prob(value), log_normal.log_prob(value))
        assert isinstance(posterior["bias"].base_dist, dist.Normal)
        torch.testing.assert_close(posterior["bias"].stddev, torch.full((5,), 0.3))

    def test_a_site_may_be_radial_at_the_same_marginal_standard_deviation(self):
        guide = AutoRadialDirectional(mixed_model, init_stddev=0.3, families={"bias": families.Radial()})
        guide.setup()
        posterior = guide.posterior()
        assert isinstance(posterior["bias"], RadialNormal)
        torch.testing.assert_close(posterior["bias"].stddev, torch.full((5,), 0.3))
        TermsELBO(strict_kl=True)(mixed_model, guide)()

    @pytest.mark.parametrize("shared", [True, False])
    def test_a_concentration_is_shared_by_the_site_or_each_groups_own(self, shared):
        guide = AutoRadialDirectional(mixed_model, shared_concentration=shared)
        guide.setup()
        assert guide.concentrations.direction.shape == ((1,) if shared else (3,))
        assert guide.posterior()["direction"].base_dist.concentration.shape == (3,)

    @pytest.mark.parametrize("cosine", [0.05, 0.5, 0.9, 0.999])
    @pytest.mark.parametrize("size", [3, 50, 800])
    def test_directions_start_near_the_mean_cosine_asked_for(self, cosine, size):
        guide = AutoRadialDirectional(lambda: pyro.sample("u", HypersphericalUniform(size)), init_mean_cosine=cosine)
        guide.setup()
        # Banerjee's inverse is an approximation, worst in few dimensions.
        found = guide.posterior()["u"].mean.norm()
        assert abs(math.log((1 - float(found)) / (1 - cosine))) < 0.25


class TestExactPosterior:
    def test_training_finds_the_conjugate_posterior_of_a_mean_direction(self):
        # Directions x_i ~ vMF(mu, k) under a uniform mu: the posterior is vMF along their sum, with k |sum|.
        truth, noise, number = torch.tensor([0.0, 0.6, 0.8]), torch.tensor(4.0), 30
        data = VonMisesFisherStable(truth, noise).sample((number,))
        total = data.sum(0)

        def model():
            mu = pyro.sample("mu", HypersphericalUniform(3))
            with pyro.plate("data", number):
                pyro.sample("x", VonMisesFisherStable(mu.expand(*mu.shape[:-2], number, 3), noise), obs=data)

        guide = AutoRadialDirectional(model)
        loss = TermsELBO(num_particles=32, vectorize_particles=True, max_plate_nesting=1, strict_kl=True)
        for rate, steps in ((0.2, 80), (0.02, 40)):
            svi = SVI(model, guide, pyro.optim.Adam({"lr": rate}), loss)
            for _ in range(steps):
                svi.step()
        distribution = guide.posterior()["mu"]
        exact = VonMisesFisherStable(total / total.norm(), noise * total.norm())
        # Nats that the learned distribution is away; the evidence itself is of the order of 10.
        assert float(kl_divergence(distribution, exact)) < 0.02


class TestAsAPrior:
    def test_a_chain_starts_its_next_guide_at_the_posterior_at_no_cost(self):
        chain = PriorChain(network(), "exact")
        x = torch.randn(6, 3)
        guide = chain.guide(AutoRadialDirectional, shared_concentration=False)
        guide.setup(x)
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        chain.advance(guide)
        following = chain.guide(AutoRadialDirectional, shared_concentration=False)
        elbo = TermsELBO(strict_kl=True)
        elbo(chain, following)(x)
        assert all(abs(float(kl)) < 1e-4 for kl in elbo.terms.kl_by_site.values())
        median = following.median()
        for site, value in guide.median().items():
            torch.testing.assert_close(median[site], value, rtol=1e-4, atol=1e-5)


class TestBadInput:
    @pytest.mark.parametrize("family", [AutoRadial, AutoMeanField])
    def test_guides_of_free_values_name_the_direction_and_the_guide_for_it(self, family):
        with pytest.raises(ValueError, match=r"'direction'.*AutoRadialDirectional"):
            family(mixed_model).setup()

    def test_a_direction_has_no_quantiles(self):
        guide = AutoRadialDirectional(mixed_model)
        guide.setup()
        with pytest.raises(ValueError, match="'direction'"):
            guide.quantiles([0.5])
