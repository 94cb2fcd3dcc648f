# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Families mixed in one guide: what they start at, what they are to a loss, a chain and a diagnosis."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    PriorChain,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods

X, Y = torch.randn(8, 4), torch.randn(8, 2)


def model():
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
    pyro.sample("bias", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
    pyro.sample("rate", dist.Gamma(2.0, 3.0).expand([2]).to_event(1))


def network():
    return SupervisedModel(BayesianModule(nn.Linear(4, 2)), likelihoods.Gaussian(num_data=8))


class Laplace(families.LocScale):
    """A family of a user."""

    def scale_of(self, site, stddev):
        return stddev / 2**0.5

    def distribution(self, site, *, loc, scale):
        return dist.Laplace(loc, scale, validate_args=False).to_event(site.event_dim)


GUIDES = {
    "radial": AutoRadial,
    "radial rows": lambda model, **kwargs: AutoRadial(model, event_dim=1, **kwargs),
    "mean field": AutoMeanField,
    "directional": AutoRadialDirectional,
    "laplace": lambda model, **kwargs: AutoMeanField(model, families={".": Laplace()}, **kwargs),
}


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES.keys())
def test_init_stddev_is_the_marginal_standard_deviation_everywhere(make):
    guide = make(model, init_stddev=0.07)
    guide.setup()
    posterior = guide.posterior()
    for name in ("weight", "bias"):
        torch.testing.assert_close(posterior[name].stddev, torch.full(posterior[name].event_shape, 0.07))
    torch.testing.assert_close(posterior["rate"].base_dist.stddev, torch.full((2,), 0.07))


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES.keys())
def test_sites_of_a_network_start_at_a_hundredth_and_all_others_as_auto_normal_does(make):
    inside = make(network())
    inside.setup(X, Y)
    for name, parameter in nn.Module.named_parameters(network().bnn.to_module(inside.median())):
        torch.testing.assert_close(inside.posterior()[name].stddev, torch.full(parameter.shape, 0.01))
    ours, pyros = make(model), AutoNormal(model)
    ours.setup()
    pyros()
    for name, value in pyros.median().items():
        torch.testing.assert_close(ours.median()[name], value)
    torch.testing.assert_close(ours.posterior()["bias"].stddev, pyros.scales.bias.detach())


def test_a_mixed_guide_has_the_kl_of_its_parts():
    weight, bias = torch.rand(3, 4), torch.rand(5)
    mixed = AutoRadial(model, init_stddev=0.2, families={"bias": families.Normal(), "rate": families.Normal()})
    radial, normal = AutoRadial(model, init_stddev=0.2), AutoMeanField(model, init_stddev=0.2)
    terms = []
    for guide in (mixed, radial, normal):
        guide.setup()
        guide.load_means({"weight": weight, "bias": bias}, strict=False)
        elbo = TermsELBO()
        elbo(model, guide)()
        terms.append(elbo.terms.kl_by_site)
    torch.testing.assert_close(terms[0]["weight"], terms[1]["weight"])
    torch.testing.assert_close(terms[0]["bias"], terms[2]["bias"])
    torch.testing.assert_close(terms[0]["rate"], terms[2]["rate"])
    assert abs(float(terms[1]["bias"] - terms[2]["bias"])) > 0.1


def test_a_point_is_trained_to_the_mode_of_the_site_s_own_space():
    guide = AutoMeanField(model, families={".": families.Delta()})
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TermsELBO(strict_kl=True))
    for _ in range(300):
        svi.step()
    # The mode of Gamma(2, 3) is (2 - 1) / 3; that of its logarithm would be at 2 / 3.
    torch.testing.assert_close(guide.median()["rate"], torch.full((2,), 1 / 3), atol=1e-3, rtol=0)
    torch.testing.assert_close(guide.median()["bias"], torch.zeros(5), atol=1e-3, rtol=0)
    quantiles = guide.quantiles([0.1, 0.9])
    assert torch.equal(quantiles["rate"][0], quantiles["rate"][1])


def test_points_start_at_the_mean_of_a_distribution():
    guide = AutoMeanField(model, families={".": families.Delta()})
    guide.start_at({"rate": dist.LogNormal(1.5, 0.3).expand([2]).to_event(1)})
    guide.setup()
    torch.testing.assert_close(guide.median()["rate"], torch.full((2,), 1.5).exp())


def test_a_chain_leaves_points_out_and_says_so():
    chain = PriorChain(network())
    guide = chain.guide(AutoRadial, families={"bias": families.Delta()})
    guide.setup(X, Y)
    with torch.no_grad():
        guide.scales.weight_unconstrained.add_(0.5)
    with pytest.warns(UserWarning, match=r"point estimates of \['bias'\]; these sites keep their prior"):
        chain.advance(guide)
    assert list(chain.prior) == ["weight"]
    # The next guide starts at the prior where there is one.
    following = chain.guide(AutoRadial)
    following.setup(X, Y)
    torch.testing.assert_close(following.posterior()["weight"].variance, chain.prior["weight"].variance)
