# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The ELBO of functions with guides that have auxiliary sites."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoMultivariateNormal, AutoNormal

from pyro_radial import AutoMeanField
from pyro_radial.functional import FunctionalELBO, GaussianKL, GaussianProcess
from pyro_radial.functional.guide_process import sites_led_to

GENERATOR = torch.Generator().manual_seed(0)


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
        elbo = functional_elbo(2_000)
        pyro.set_rng_seed(0)
        elbo(noisy_model, guide)(*self.data).backward()
        kls = elbo.terms.kl_by_site
        assert set(kls) == {"f", "noise", "noise_unconstrained"}
        loc, scale = guide.locs.noise.detach(), guide.scales.noise.detach()
        exact = torch.distributions.kl_divergence(dist.Normal(loc, scale), dist.Normal(0.3, 0.5))
        # Its draws have a standard deviation of about one.
        assert kls["noise"] + kls["noise_unconstrained"] == pytest.approx(float(exact), abs=4 / 2_000**0.5)

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
