# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The process of a guide, from a run of it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.functional import PosteriorProcess
from pyro_radial.infer.guide_process import GuideProcess
from pyro_radial.nn import likelihoods
from tests.helpers.linear_models import by_hand, inputs, of_functions, posterior

X, Y = torch.randn(6, 3), torch.randn(6, 2)


def process_of(model, guide, *args, **kwargs):
    guide_trace = poutine.trace(guide).get_trace(*args)
    model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args)
    return GuideProcess(model, model_trace, guide_trace, "f", kwargs.get("structures", {}))


def regression():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=6))


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_it_is_that_of_the_guides_posterior_with_gradients_in_its_parameters(guide_type):
    model = regression()
    guide = guide_type(model)
    guide.setup(X, Y)
    mean, variance = process_of(model, guide, X, Y).marginals(X)
    expected = PosteriorProcess(model, guide.posterior()).marginals(X)
    torch.testing.assert_close((mean.detach(), variance.detach()), expected)
    (mean.sum() + variance.sum()).backward()
    weights = {name: p.grad for name, p in guide.named_parameters() if "precision" not in name}
    assert all(gradient is not None and bool(gradient.any()) for gradient in weights.values())
    assert model.training
    assert model.bnn.skeleton.training


def test_pyros_guide_that_draws_apart_is_taken():
    model = regression()
    guide = AutoNormal(model, init_scale=0.2)
    mean, variance = process_of(model, guide, X, Y).marginals(X)
    medians = {name: value.detach() for name, value in guide.median(X, Y).items() if name in model.bnn.sites}
    posterior = {name: dist.Normal(value, 0.2).to_event(value.dim()) for name, value in medians.items()}
    torch.testing.assert_close((mean.detach(), variance.detach()), PosteriorProcess(model, posterior).marginals(X))


def test_a_guide_by_hand_with_a_full_covariance_is_taken():
    given, mean, covariance = posterior("full", "weight")

    def guide(x, y=None):
        pyro.sample("noise", dist.Gamma(2.0, 2.0))
        pyro.sample("weight", given["weight"])

    x = inputs()
    expected, covariances = of_functions(mean, covariance, x)
    found = process_of(by_hand, guide, x).marginals(x)
    torch.testing.assert_close(found, (expected, covariances.diagonal(dim1=-2, dim2=-1).mT))


def test_points_have_no_variance():
    model = regression()
    _, variance = process_of(model, AutoDelta(model), X, Y).marginals(X)
    assert not bool(variance.any())


def test_what_is_known_of_a_function_is_found_once_for_each_head(monkeypatch):
    model = regression()
    guide = AutoMeanField(model)
    guide.setup(X, Y)
    structures = {}
    process = process_of(model, guide, X, Y, structures=structures)
    assert process.sites(X) == set(model.bnn.sites)
    (key,) = structures
    assert key == (2, model.bnn.sites)
    again = process_of(model, guide, X, Y, structures=structures)
    monkeypatch.setattr("pyro_radial.functional.linearization.linear_layers", None)
    assert again.sites(X) == set(model.bnn.sites)
    torch.testing.assert_close(again.marginals(X), process.marginals(X))
