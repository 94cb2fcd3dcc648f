# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.functional import BNNPrior
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.helpers.processes import NUM_SAMPLES
from tests.helpers.scale_priors import LearnedScale


def small_bnn(outputs=1, prior=None):
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, outputs))
    return BayesianModule(net, dist.Normal(0.0, 1.0) if prior is None else prior)


def test_functions_of_a_linear_network_have_the_moments_of_its_prior():
    bnn = BayesianModule(nn.Linear(2, 1), {"weight": dist.Normal(0.5, 2.0), "bias": dist.Normal(0.0, 0.3)})
    x = torch.randn(4, 2)
    f = BNNPrior(bnn).sample(x, NUM_SAMPLES)[..., 0]
    covariance = 4.0 * x @ x.T + 0.09
    variance = covariance.diagonal()
    assert bool(((f.mean(0) - 0.5 * x.sum(-1)).abs() < 5 * (variance / NUM_SAMPLES).sqrt()).all())
    standard_error = ((variance[:, None] * variance + covariance.square()) / NUM_SAMPLES).sqrt()
    assert bool(((f.T.cov() - covariance).abs() < 5 * standard_error).all())


@pytest.mark.parametrize("guide_class", [AutoRadial, AutoMeanField, AutoNormal, AutoLowRankMultivariateNormal])
def test_functions_under_a_guide_are_near_those_of_its_median_when_it_is_narrow(guide_class):
    bnn = small_bnn(outputs=2)
    # What Pyro's guides call a scale is the standard deviation too.
    start = "init_stddev" if guide_class in (AutoRadial, AutoMeanField) else "init_scale"
    guide = guide_class(bnn, **{start: 1e-4})
    x = torch.randn(5, 1)
    guide(x)
    f = BNNPrior(bnn, guide).sample(x, 6, num_outputs=2)
    expected = bnn.to_module(guide.median(x))(x)
    torch.testing.assert_close(f, expected.expand(6, -1, -1), rtol=0, atol=2e-2)
    assert float(f.std(0).min()) > 0


def test_a_guide_of_a_supervised_model_serves_its_network():
    model = SupervisedModel(small_bnn(), likelihoods.Gaussian(num_data=5))
    guide = AutoRadial(model)
    guide.setup(torch.zeros(5, 1), torch.zeros(5, 1))
    assert BNNPrior(model.bnn, guide).sample(torch.zeros(3, 1), 4).shape == (4, 3, 1)


@pytest.mark.parametrize("num_samples", [1, 2, 7])
@pytest.mark.parametrize("prior", [lambda: dist.Normal(0.0, 1.0), LearnedScale, lambda: RadialDirectionalPrior("row")])
def test_any_number_of_draws_has_its_dim_whatever_sites_the_prior_makes(num_samples, prior):
    f = BNNPrior(small_bnn(prior=prior())).sample(torch.zeros(4, 1), num_samples)
    assert f.shape == (num_samples, 4, 1)


def test_a_function_may_be_the_guide_and_what_it_leaves_out_comes_from_the_prior():
    bnn = BayesianModule(nn.Linear(1, 1), dist.Normal(0.0, 1.0))

    def guide(x):
        loc = pyro.param("loc", torch.tensor([[7.0]]))
        pyro.sample("weight", dist.Normal(loc, 1e-3).to_event(2))

    slope_and_rest = BNNPrior(bnn, guide).sample(torch.tensor([[0.0], [1.0]]), 4000)[..., 0]
    slope = slope_and_rest[:, 1] - slope_and_rest[:, 0]
    assert float((slope - 7.0).abs().max()) < 0.01
    assert float(slope_and_rest[:, 0].std()) == pytest.approx(1.0, rel=5 / math.sqrt(2 * 4000))


@pytest.mark.parametrize("guide_class", [AutoRadial, AutoNormal])
def test_the_prior_stays_where_it_is_when_guide_and_network_train_on(guide_class):
    x, y = torch.randn(20, 1), torch.randn(20, 1)
    model = SupervisedModel(small_bnn(), likelihoods.Gaussian(num_data=20))
    guide = guide_class(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    svi.step(x, y)
    prior = BNNPrior(model.bnn, guide)
    copied = copy.deepcopy(prior)

    def draw(prior):
        pyro.set_rng_seed(1)
        return prior.sample(x, 3)

    before, median = draw(prior), guide.median(x)["0.weight"].detach().clone()
    for _ in range(10):
        svi.step(x, y)
    assert float((guide.median(x)["0.weight"] - median).abs().min()) > 0.1
    assert torch.equal(draw(prior), before)
    assert torch.equal(draw(copied), before)
    pyro.clear_param_store()
    assert torch.equal(draw(prior), before)


def test_draws_within_a_training_step_leave_no_site_and_no_gradient():
    bnn = small_bnn()
    guide = AutoRadial(bnn)
    x = torch.randn(4, 1)
    guide.setup(x)
    prior = BNNPrior(bnn, guide)
    with pyro.poutine.trace() as handler, pyro.plate("outer", 5):
        f = prior.sample(x, 3)
    assert f.shape == (3, 4, 1)
    assert [name for name in handler.trace.nodes if name != "outer"] == []
    assert not f.requires_grad
    assert not any(parameter.requires_grad for parameter in prior.parameters())
    assert all(parameter.requires_grad for parameter in guide.parameters())


def test_running_statistics_and_modes_stay_as_they_are():
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    bnn = BayesianModule(net).train()
    prior = BNNPrior(bnn).train()
    before = copy.deepcopy(prior.state_dict())
    prior.sample(torch.randn(6, 1), 1)
    assert not prior.bnn.training
    assert bnn.training
    assert all(torch.equal(prior.state_dict()[name], value) for name, value in before.items())


def test_a_point_estimate_gives_the_same_function_at_every_draw():
    bnn = small_bnn()
    guide = AutoDelta(bnn)
    x = torch.randn(4, 1)
    guide(x)
    f = BNNPrior(bnn, guide).sample(x, 3)
    torch.testing.assert_close(f, f[:1].expand(3, -1, -1))


class NoPyroModule(nn.Module):
    def forward(self, x):
        return None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.Linear(1, 1),), "bnn must be a BayesianModule"),
        ((small_bnn(), 3), "guide must be a function"),
        ((small_bnn(), NoPyroModule()), "guide must be a PyroModule"),
        ((small_bnn(), AutoRadial(small_bnn())), "guide must have parameters"),
    ],
)
def test_networks_and_guides_that_do_not_fit_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        BNNPrior(*arguments)


def test_a_network_with_another_number_of_outputs_is_refused():
    with pytest.raises(ValueError, match=r"BNNPrior: .* shape \(3, 4, 1\)"):
        BNNPrior(small_bnn(outputs=2)).sample(torch.zeros(4, 1), 3)
