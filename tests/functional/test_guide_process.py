# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The process of a guide, from a run of it."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.functional import PosteriorProcess
from pyro_radial.functional.guide_process import GuideProcess
from pyro_radial.infer.loss.elbo import Run
from pyro_radial.nn import likelihoods
from tests.helpers.linear_models import WIDTH, by_hand, features, inputs

X, Y = torch.randn(6, 3), torch.randn(6, 2)


def process_of(model, guide, *args, **kwargs):
    guide_trace = poutine.trace(guide).get_trace(*args)
    model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args)
    run = Run(model, guide, args, {}, model_trace, guide_trace, {})
    return GuideProcess(run, "f", kwargs.get("structures", {}))


def regression():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=6))


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_it_is_that_of_the_guides_posterior_with_gradients_in_its_parameters(guide_type):
    model = regression()
    guide = guide_type(model)
    guide.setup(X, Y)
    mean, covariance = process_of(model, guide, X, Y).moments(X)
    expected = PosteriorProcess(model, guide.posterior()).moments(X)
    torch.testing.assert_close((mean.detach(), covariance.detach()), expected)
    marginals = process_of(model, guide, X, Y).marginals(X)
    expected = PosteriorProcess(model, guide.posterior()).marginals(X)
    torch.testing.assert_close(tuple(moment.detach() for moment in marginals), expected)
    (mean.sum() + covariance.sum()).backward()
    weights = {name: p.grad for name, p in guide.named_parameters() if "precision" not in name}
    assert all(gradient is not None and bool(gradient.any()) for gradient in weights.values())
    assert model.training
    assert model.bnn.skeleton.training


JOINT = {
    "full": AutoMultivariateNormal,
    "low rank": lambda model: AutoLowRankMultivariateNormal(model, rank=3),
    "diagonal": AutoDiagonalNormal,
}


def moved(kind):
    """Pyro's guide of the noise, in its logarithm, and the ten weights together, at some place; and its posterior."""
    guide = JOINT[kind](by_hand)
    guide(inputs(), torch.zeros(7, 2).double())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return guide, guide.get_posterior()


@pytest.mark.parametrize("kind", JOINT)
def test_pyros_guides_of_one_vector_are_taken(kind):
    guide, joint = moved(kind)
    mean = joint.mean[1:].detach().double().reshape(2, WIDTH)
    full = getattr(joint, "covariance_matrix", None)
    full = joint.variance.diag_embed() if full is None else full
    across = full[1:, 1:].detach().double().reshape(2, WIDTH, 2, WIDTH)
    x, y = inputs(), torch.zeros(7, 2).double()
    phi = features(x)
    process = process_of(by_hand, guide, x, y)
    values, covariance = process.moments(x)
    torch.testing.assert_close(values.detach(), phi @ mean.mT)
    expected = torch.stack([phi @ across[unit, :, unit] @ phi.mT for unit in range(2)])
    torch.testing.assert_close(covariance.detach(), expected)
    covariance.sum().backward()
    widths = [p.grad for name, p in guide.named_parameters() if name != "loc"]
    assert all(bool(gradient[1:].any()) for gradient in widths)


def test_a_site_that_is_computed_from_a_vector_is_not_taken_for_a_part_of_it():
    def guide(x, y=None):
        vector = pyro.sample("v", dist.Normal(torch.zeros(11).double(), 1.0).to_event(1), infer={"is_auxiliary": True})
        pyro.sample("noise", dist.Delta(vector[0].exp()))
        pyro.sample("weight", dist.Delta(2 * vector[1:].reshape(2, WIDTH), event_dim=2))

    with pytest.raises(ValueError, match="must have a mean and a variance at site 'weight'"):
        process_of(by_hand, guide, inputs()).moments(inputs())


def test_what_is_known_of_a_function_is_found_once_for_each_head(monkeypatch):
    model = regression()
    guide = AutoMeanField(model)
    guide.setup(X, Y)
    structures = {}
    process = process_of(model, guide, X, Y, structures=structures)
    assert process.sites(X) == set(model.bnn.sites)
    (key,) = structures
    assert key == ((3,), model.bnn.sites)
    again = process_of(model, guide, X, Y, structures=structures)
    monkeypatch.setattr("pyro_radial.nn.linearized.linearization.linear_layers", None)
    assert again.sites(X) == set(model.bnn.sites)
    torch.testing.assert_close(again.moments(X), process.moments(X))
