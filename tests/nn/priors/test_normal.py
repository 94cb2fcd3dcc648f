# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors: their densities in closed form, and their sites."""

import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch import nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.priors import FanIn, ScaleMixture
from tests.helpers.networks import mlp, normed_mlp


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


class TestScaleMixture:
    def test_the_density_is_the_mixture_of_blundell(self):
        value = torch.cat([torch.linspace(-4, 4, 21), torch.tensor([1e-4, 5e-3])]).double()
        ours = ScaleMixture(0.25, 2.0, 0.01)("w", value).log_prob(value)
        theirs = 0.25 * stats.norm.pdf(value, 0, 2.0) + 0.75 * stats.norm.pdf(value, 0, 0.01)
        torch.testing.assert_close(ours, torch.from_numpy(theirs).log())

    def test_the_defaults_are_those_of_the_docstring(self):
        prior = ScaleMixture()
        assert (prior.pi, prior.scale1, prior.scale2) == (0.5, 1.0, math.exp(-6))

    def test_the_elements_of_a_site_are_independent(self):
        bnn = BayesianModule(nn.Linear(3, 2), ScaleMixture(0.25))
        site = poutine.trace(bnn).get_trace(torch.randn(5, 3)).nodes["weight"]
        expected = ScaleMixture(0.25)("w", site["value"]).log_prob(site["value"]).sum()
        torch.testing.assert_close(site["fn"].log_prob(site["value"]), expected)

    @pytest.mark.parametrize("vectorized", [False, True])
    def test_an_autoguide_trains_under_it(self, vectorized):
        model, (x, y) = regression(ScaleMixture()), points()
        elbo = Trace_ELBO(num_particles=2, vectorize_particles=vectorized)
        svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.03}), elbo)
        losses = [svi.step(x, y) for _ in range(60)]
        assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (FanIn, "gain"),
        (FanIn, "bias_scale"),
        (ScaleMixture, "scale1"),
        (ScaleMixture, "scale2"),
    ],
)
def test_scales_out_of_range_are_named(make, argument, bad):
    with pytest.raises(ValueError, match=f"{argument} must be a positive finite number"):
        make(**{argument: bad})


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, math.nan])
def test_a_mixing_weight_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match="pi must be between"):
        ScaleMixture(pi=bad)


def test_norm_layers_keep_their_parameters_under_every_prior():
    for prior in (FanIn(), ScaleMixture()):
        assert "1.weight" not in BayesianModule(normed_mlp(), prior).sites
