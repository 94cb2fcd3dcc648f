# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors: their densities in closed form, and their sites."""

import math

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch import nn

from pyro_radial import AutoRadial
from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.priors import FanIn
from tests.helpers.networks import mlp, normed_mlp
from tests.helpers.scale_priors import scale_mixture


def regression(prior, num_data=20):
    return SupervisedModel(BayesianModule(mlp(outputs=1), prior), likelihoods.Gaussian(num_data=num_data))


def points(size=20):
    x = torch.randn(size, 3)
    return x, x[:, :1]


class TestFanIn:
    @pytest.mark.parametrize(
        ("layer", "fan_in"),
        [(nn.Linear(5, 2), 5), (nn.Conv2d(4, 3, (2, 3)), 24), (nn.Conv2d(4, 6, 3, groups=2), 18)],
    )
    def test_the_scale_of_a_weight_is_gain_over_root_fan_in(self, layer, fan_in):
        prior = FanIn(gain=2.0, bias_scale=0.3)
        assert prior("weight", layer.weight).scale.item() == pytest.approx(2.0 / math.sqrt(fan_in))
        assert prior("bias", layer.bias).scale.item() == pytest.approx(0.3)

    def test_an_embedding_scales_with_its_width(self):
        assert FanIn()("weight", nn.Embedding(1000, 16).weight).scale.item() == pytest.approx(0.25)


class TestMixture:
    def test_the_elements_of_a_site_are_independent(self):
        bnn = BayesianModule(nn.Linear(3, 2), scale_mixture(0.25, 2.0, 0.01))
        site = poutine.trace(bnn).get_trace(torch.randn(5, 3)).nodes["weight"]
        value = site["value"].detach()
        expected = 0.25 * stats.norm.pdf(value, 0, 2.0) + 0.75 * stats.norm.pdf(value, 0, 0.01)
        torch.testing.assert_close(float(site["fn"].log_prob(value)), float(np.log(expected).sum()), rtol=1e-5, atol=0)

    @pytest.mark.parametrize("vectorized", [False, True])
    @pytest.mark.parametrize("guide_type", [AutoNormal, AutoRadial])
    def test_an_autoguide_trains_under_it(self, guide_type, vectorized):
        model, (x, y) = regression(scale_mixture()), points()
        elbo = Trace_ELBO(num_particles=2, vectorize_particles=vectorized)
        svi = SVI(model, guide_type(model), pyro.optim.Adam({"lr": 0.03}), elbo)
        losses = [svi.step(x, y) for _ in range(60)]
        assert sum(losses[-10:]) < sum(losses[:10])


def test_norm_layers_keep_their_parameters_under_every_prior():
    for prior in (FanIn(), scale_mixture()):
        assert "1.weight" not in BayesianModule(normed_mlp(), prior).sites
