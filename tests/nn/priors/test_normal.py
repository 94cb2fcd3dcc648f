# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors: their densities in closed form, their sites, and that their scales are learned."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch import nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.priors import FanIn, HyperScale, LearnedScale, ScaleMixture
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

    def test_wide_layers_keep_the_size_of_their_output(self):
        bnn = BayesianModule(nn.Linear(4096, 500, bias=False), FanIn(gain=1.5))
        output = bnn(torch.ones(1, 4096))
        # The standard error of a standard deviation from 500 values is 3 %.
        assert output.std().item() == pytest.approx(1.5, rel=0.13)


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

    def test_it_finds_the_scale_that_maximizes_the_evidence(self):
        # With the guide fixed at N(m, s^2), the best prior variance is the mean of m^2 + s^2.
        prior = LearnedScale(1.0)
        bnn = BayesianModule(nn.Linear(30, 20, bias=False), prior)
        loc, spread = 0.2 * torch.randn(20, 30), 0.1

        def guide():
            pyro.sample("weight", dist.Normal(loc, spread).to_event(2))

        svi = SVI(bnn.sample_parameters, guide, pyro.optim.Adam({"lr": 0.02}), TraceMeanField_ELBO())
        for _ in range(400):
            svi.step()
        expected = (loc.square().mean() + spread**2).sqrt().item()
        assert prior.scale("weight").item() == pytest.approx(expected, rel=0.02)

    def test_it_works_with_vectorized_particles(self):
        model, (x, y) = regression(LearnedScale()), points()
        elbo = TraceMeanField_ELBO(num_particles=3, vectorize_particles=True)
        SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.05}), elbo).step(x, y)
        assert model.bnn.prior.scale("0.weight").item() != 1.0

    def test_one_object_serves_one_network(self):
        prior = LearnedScale()
        BayesianModule(mlp(), prior)
        with pytest.raises(ValueError, match="already"):
            BayesianModule(mlp(), prior)

    def test_an_unknown_site_is_named(self):
        with pytest.raises(ValueError, match="'nothing'"):
            LearnedScale().scale("nothing")

    def test_its_state_is_the_models_state(self):
        bnn, other = BayesianModule(mlp(), LearnedScale(0.5)), BayesianModule(mlp(), LearnedScale())
        other.load_state_dict(bnn.state_dict())
        assert other.prior.scale("2.bias").item() == pytest.approx(0.5)


class TestHyperScale:
    def test_the_density_is_that_of_scale_and_weight(self):
        bnn = BayesianModule(nn.Linear(3, 2, bias=False), HyperScale(dist.HalfNormal(0.7)))
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

    @pytest.mark.parametrize("vectorized", [False, True])
    def test_a_stock_autoguide_trains_and_predicts(self, vectorized):
        # A site name with a dot below another site's would break the guide's own names.
        model, (x, y) = regression(HyperScale()), points()
        guide = AutoNormal(model)
        elbo = Trace_ELBO(num_particles=3, vectorize_particles=vectorized)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
        losses = [svi.step(x, y) for _ in range(60)]
        assert sum(losses[-10:]) < sum(losses[:10])
        assert "0.weight_prior_scale" in guide.median()
        draws = Predictive(model, guide=guide, num_samples=5, parallel=vectorized)(torch.randn(9, 3))
        assert draws["f"].shape == (5, 9, 1)

    def test_a_draw_needs_the_weights_only(self):
        bnn = BayesianModule(nn.Linear(3, 2), HyperScale())
        weights = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
        assert torch.equal(bnn.to_module(weights).weight, weights["weight"])
        with pytest.raises(ValueError, match="'bias_prior_scale', which 'bias' needs"):
            bnn.to_module({"weight": weights["weight"]})


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (FanIn, "gain"),
        (FanIn, "bias_scale"),
        (ScaleMixture, "scale1"),
        (ScaleMixture, "scale2"),
        (LearnedScale, "init_scale"),
    ],
)
def test_scales_out_of_range_are_named(make, argument, bad):
    with pytest.raises(ValueError, match=f"{argument} must be a positive finite number"):
        make(**{argument: bad})


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, math.nan])
def test_a_mixing_weight_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match="pi must be between"):
        ScaleMixture(pi=bad)


@pytest.mark.parametrize("bad", [1.0, dist.Normal(0.0, 1.0), dist.HalfNormal(torch.ones(2))])
def test_a_scale_prior_that_is_no_distribution_of_one_positive_number_is_named(bad):
    with pytest.raises(ValueError, match="scale_prior must"):
        HyperScale(bad)


def test_norm_layers_keep_their_parameters_under_every_prior():
    for prior in (FanIn(), ScaleMixture(), LearnedScale(), HyperScale()):
        assert "1.weight" not in BayesianModule(normed_mlp(), prior).sites
