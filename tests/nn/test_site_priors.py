# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors of all kinds: densities in closed form, sites of their own, and modules that train with the guide."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch import nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.priors import FanIn
from tests.helpers.networks import mlp
from tests.helpers.scale_priors import HyperScale, LearnedScale, scale_mixture

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1]


def regression(prior):
    return SupervisedModel(BayesianModule(mlp(outputs=1), prior), likelihoods.Gaussian(num_data=20))


@pytest.mark.parametrize(
    ("layer", "fan_in"), [(nn.Linear(5, 2), 5), (nn.Conv2d(4, 3, (2, 3)), 24), (nn.Conv2d(4, 6, 3, groups=2), 18)]
)
def test_the_scale_of_a_weight_is_gain_over_root_fan_in(layer, fan_in):
    prior = FanIn(gain=2.0, bias_scale=0.3)
    assert repr(prior) == "FanIn(2, 0.3)"
    assert prior("weight", layer.weight).scale.item() == pytest.approx(2.0 / math.sqrt(fan_in))
    assert prior("bias", layer.bias).scale.item() == pytest.approx(0.3)


def test_an_embedding_scales_with_its_width():
    assert FanIn()("weight", nn.Embedding(1000, 16).weight).scale.item() == pytest.approx(0.25)


def test_the_elements_of_a_mixture_are_independent():
    bnn = BayesianModule(nn.Linear(3, 2), scale_mixture(0.25, 2.0, 0.01))
    site = poutine.trace(bnn).get_trace(X).nodes["weight"]
    value = site["value"].detach()
    expected = 0.25 * stats.norm.pdf(value, 0, 2.0) + 0.75 * stats.norm.pdf(value, 0, 0.01)
    torch.testing.assert_close(float(site["fn"].log_prob(value)), float(np.log(expected).sum()), rtol=1e-5, atol=0)


def test_there_is_one_learned_scale_per_parameter_and_pyro_sees_it():
    model = regression(LearnedScale(0.5))
    trace = poutine.trace(model).get_trace(X, Y)
    prefix = f"{model.bnn._pyro_name}.prior.scales."
    assert set(trace.param_nodes) == {prefix + site for site in model.bnn.sites}
    assert trace.nodes["0.weight"]["fn"].base_dist.scale.unique().item() == pytest.approx(0.5)
    assert torch.equal(trace.nodes["0.weight"]["infer"]["initial_value"], model.bnn._initial["0.weight"])


@pytest.mark.parametrize("form", ["svi", "module"])
def test_learned_scales_are_trained_with_the_guide(form):
    model = regression(LearnedScale())
    guide = AutoNormal(model)
    if form == "svi":
        SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO()).step(X, Y)
    else:
        elbo = TraceMeanField_ELBO()(model, guide)
        elbo(X, Y).backward()
        torch.optim.Adam(elbo.parameters(), lr=0.05).step()
    scales = [model.bnn.prior.scale(site).item() for site in model.bnn.sites]
    assert all(abs(scale - 1.0) > 1e-3 for scale in scales)


def test_each_particle_has_a_random_scale_of_its_own():
    bnn = BayesianModule(nn.Linear(3, 2), HyperScale())
    with pyro.plate("particles", 4, dim=-2):
        trace = poutine.trace(bnn).get_trace(X)
    trace.compute_log_prob()
    scale, weight = trace.nodes["weight_prior_scale"]["value"], trace.nodes["weight"]
    assert (scale.shape, weight["value"].shape) == ((4, 1), (4, 1, 2, 3))
    expected = dist.Normal(0.0, scale[..., None, None]).log_prob(weight["value"]).sum((-1, -2))
    torch.testing.assert_close(weight["log_prob"], expected)
    assert trace.nodes["_RETURN"]["value"].shape == (4, 20, 2)
