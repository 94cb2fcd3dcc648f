# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The network alone gives what the model gives, and is used where it does and only there."""

import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.nn.functional import dropout

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule, PriorChain, SupervisedModel
from pyro_radial.nn import MultiHead, likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.poutine import mean_only, swap_prior
from tests.helpers.predictions import CLASSES, GAMMA, POINTS, X, draws
from tests.helpers.scale_priors import LearnedScale

# The package's attribute of this name is the function.
PREDICT_MODULE = sys.modules["pyro_radial.infer.prediction.predict"]


def mlp():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


class Noisy(nn.Module):
    """A network with random numbers of its own, also in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, CLASSES)

    def forward(self, x):
        return dropout(self.linear(x), 0.5)


class Tempered(likelihoods.Categorical):
    """A likelihood that records something else than the output of the network."""

    def forward(self, f, y=None):
        return super().forward(f / 2, y)


class Moved(nn.Module):
    """A module around a model that gives it other inputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.likelihood = model.likelihood

    def forward(self, x, y=None):
        return self.model(x + 1.0, y)


class Conditioned(nn.Module):
    """A module that fixes a site of the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.likelihood = model.likelihood

    def forward(self, x, y=None):
        with poutine.condition(data={"4.bias": torch.full((CLASSES,), 5.0)}):
            return self.model(x, y)


def scaled(model):
    model.bnn.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def hidden(model):
    return AutoRadial(poutine.block(model, hide=["4.weight", "precision"]))


def network(model=None, net=mlp, prior=None, likelihood=None, guide=AutoRadial, by_network=True, chunk_size=9):
    """A case: what is made, and whether its network is to run alone."""
    return {
        "wrap": model or (lambda model: model),
        "net": net,
        "prior": prior or (lambda: dist.Normal(0.0, 1.0)),
        "likelihood": likelihood or likelihoods.Categorical,
        "guide": guide,
        "by_network": by_network,
        "chunk_size": chunk_size,
    }


def random_noise():
    return likelihoods.Gaussian(precision_prior=GAMMA)


CASES = {
    "radial": network(),
    "mean field": network(guide=AutoMeanField),
    "Pyro's guide": network(guide=AutoNormal),
    "several sites a parameter": network(prior=lambda: RadialDirectionalPrior("row"), guide=AutoRadialDirectional),
    "learned prior": network(prior=LearnedScale),
    "random noise": network(likelihood=random_noise),
    "what the guide leaves out": network(likelihood=random_noise, guide=hidden),
    "chain": network(PriorChain),
    "swapped prior": network(lambda m: swap_prior(m, {"4.bias": dist.Normal(torch.ones(CLASSES), 0.1).to_event(1)})),
    "heads": network(net=lambda: MultiHead(nn.Linear(2, 4), [nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)])),
    # In one pass, since the targets of a pass, which the network alone does not sample, come before the next.
    "noise within": network(net=Noisy, chunk_size=500),
    "noise within and in the likelihood": network(net=Noisy, likelihood=random_noise, chunk_size=500),
    "other inputs": network(Moved, by_network=False),
    "a site fixed": network(Conditioned, by_network=False),
    "a hook": network(scaled, by_network=False),
    "a likelihood of its own": network(likelihood=Tempered, by_network=False),
    "a handler": network(lambda model: poutine.scale(model, 2.0), by_network=False),
}


def made(case):
    pyro.set_rng_seed(0)
    likelihood = case["likelihood"]()
    model = case["wrap"](SupervisedModel(BayesianModule(case["net"](), case["prior"]()), likelihood))
    guide = case["guide"](model)
    y = torch.zeros(POINTS, CLASSES) if isinstance(likelihood, likelihoods.Gaussian) else torch.zeros(POINTS).long()
    guide(X, y)
    return model, guide


@pytest.mark.parametrize("kind", CASES)
def test_predictions_are_those_of_runs_of_the_model_bit_by_bit(kind, monkeypatch):
    case = CASES[kind]
    used = []
    run = PREDICT_MODULE._NetworkRun
    monkeypatch.setattr(run, "values", spying(run.values, used))
    model, guide = made(case)
    size = case["chunk_size"]
    found = draws(model, guide, chunk_size=size)
    state = torch.get_rng_state()
    assert len(used) == (6 * -(-POINTS // size) if case["by_network"] else 0)
    monkeypatch.setattr(PREDICT_MODULE, "find_network", lambda model: None)
    expected = draws(model, guide, chunk_size=size)
    assert torch.equal(found.samples, expected.samples)
    assert found.noise.keys() == expected.noise.keys()
    assert all(torch.equal(found.noise[name], value) for name, value in expected.noise.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert float((found.samples[0] - found.samples[1]).abs().max()) > 1e-4


def spying(method, used):
    def values(self, inputs):
        used.append(len(inputs))
        return method(self, inputs)

    return values


def test_a_handler_around_the_call_acts_on_every_draw():
    model, guide = made(network(likelihood=likelihoods.Gaussian))
    with mean_only():
        samples = draws(model, guide).samples
    with torch.no_grad():
        expected = model.bnn.to_module(guide.median()).eval()(X)
    assert torch.allclose(samples, expected.expand_as(samples), atol=1e-6)
