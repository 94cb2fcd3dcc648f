# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors that make their own sites, and a prior that is a module and trains with the guide."""

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
from tests.helpers.networks import mlp, normed_mlp
from tests.helpers.scale_priors import HyperScale, LearnedScale


def regression(prior, num_data=20):
    return SupervisedModel(BayesianModule(mlp(outputs=1), prior), likelihoods.Gaussian(num_data=num_data))


def points(size=20):
    x = torch.randn(size, 3)
    return x, x[:, :1]


class TestLearnedScale:
    def test_there_is_one_scale_per_parameter_and_pyro_sees_it(self):
        model = regression(LearnedScale(0.5))
        trace = poutine.trace(model).get_trace(*points())
        prefix = f"{model.bnn._pyro_name}.prior.scales."
        assert set(trace.param_nodes) == {prefix + site for site in model.bnn.sites}
        assert trace.nodes["0.weight"]["fn"].base_dist.scale.unique().item() == pytest.approx(0.5)
        assert torch.equal(trace.nodes["0.weight"]["infer"]["initial_value"], model.bnn._initial["0.weight"])

    @pytest.mark.parametrize("form", ["svi", "module"])
    def test_it_is_trained_with_the_guide(self, form):
        model, (x, y) = regression(LearnedScale()), points()
        guide = AutoNormal(model)
        if form == "svi":
            svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO())
            for _ in range(3):
                svi.step(x, y)
        else:
            elbo = TraceMeanField_ELBO()(model, guide)
            elbo(x, y)
            optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
            for _ in range(3):
                optimizer.zero_grad()
                elbo(x, y).backward()
                optimizer.step()
        scales = [model.bnn.prior.scale(site).item() for site in model.bnn.sites]
        assert all(abs(scale - 1.0) > 1e-3 for scale in scales)


class TestHyperScale:
    def test_the_density_is_that_of_scale_and_weight(self):
        bnn = BayesianModule(nn.Linear(3, 2, bias=False), HyperScale(0.7))
        draw = {"weight_prior_scale": torch.tensor(0.4), "weight": torch.randn(2, 3)}
        trace = poutine.trace(poutine.condition(bnn, data=draw)).get_trace(torch.randn(5, 3))
        expected = stats.halfnorm.logpdf(0.4, scale=0.7) + stats.norm.logpdf(draw["weight"], 0, 0.4).sum()
        assert trace.log_prob_sum().item() == pytest.approx(expected, rel=1e-5)

    def test_each_particle_has_its_own_scale(self):
        bnn = BayesianModule(nn.Linear(3, 2), HyperScale())
        with pyro.plate("particles", 4, dim=-2):
            trace = poutine.trace(bnn).get_trace(torch.randn(5, 3))
        trace.compute_log_prob()
        scale = trace.nodes["weight_prior_scale"]["value"]
        weight = trace.nodes["weight"]
        assert (scale.shape, weight["value"].shape) == ((4, 1), (4, 1, 2, 3))
        expected = dist.Normal(0.0, scale[..., None, None]).log_prob(weight["value"]).sum((-1, -2))
        torch.testing.assert_close(weight["log_prob"], expected)
        assert trace.nodes["_RETURN"]["value"].shape == (4, 5, 2)


def test_norm_layers_keep_their_parameters():
    for prior in (LearnedScale(), HyperScale()):
        assert "1.weight" not in BayesianModule(normed_mlp(), prior).sites
