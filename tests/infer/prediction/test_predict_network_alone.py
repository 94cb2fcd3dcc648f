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
from tests.helpers.networks import Net
from tests.helpers.predictions import CLASSES, GAMMA, POINTS, X, draws
from tests.helpers.scale_priors import LearnedScale

# The package's attribute of this name is the function.
PREDICT_MODULE = sys.modules["pyro_radial.infer.prediction.predict"]


def mlp():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def noisy():
    """A network with random numbers of its own, also in evaluation mode."""
    return Net(lambda net, x: dropout(net.linear(x), 0.5), linear=nn.Linear(2, CLASSES))


class Tempered(likelihoods.Categorical):
    """A likelihood that records something else than the output of the network."""

    def forward(self, f, y=None):
        return super().forward(f / 2, y)


class Wrapped(nn.Module):
    """A module around a model that gives it other inputs and fixes some sites."""

    def __init__(self, model, shift=0.0, fixed=()):
        super().__init__()
        self.model, self.shift, self.fixed = model, shift, dict(fixed)
        self.likelihood = model.likelihood

    def forward(self, x, y=None):
        with poutine.condition(data=self.fixed):
            return self.model(x + self.shift, y)


def scaled(model):
    model.bnn.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def hidden(model):
    return AutoRadial(poutine.block(model, hide=["4.weight", "precision"]))


def random_noise():
    return likelihoods.Gaussian(precision_prior=GAMMA)


def two_heads():
    return MultiHead(nn.Linear(2, 4), [nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)])


BIAS = torch.full((CLASSES,), 5.0)
# In one pass, since the targets of a pass, which the network alone does not sample, come before the next.
ONE_PASS = {"net": noisy, "chunk_size": 500}
# What is made, where it differs from a network of classes under a radial guide.
BY_NETWORK = {
    "radial": {},
    "mean field": {"guide": AutoMeanField},
    "Pyro's guide": {"guide": AutoNormal},
    "several sites a parameter": {"prior": lambda: RadialDirectionalPrior("row"), "guide": AutoRadialDirectional},
    "learned prior": {"prior": LearnedScale},
    "random noise": {"likelihood": random_noise},
    "what the guide leaves out": {"likelihood": random_noise, "guide": hidden},
    "chain": {"wrap": PriorChain},
    "swapped prior": {"wrap": lambda model: swap_prior(model, {"4.bias": dist.Normal(BIAS, 0.1).to_event(1)})},
    "heads": {"net": two_heads},
    "noise within": ONE_PASS,
    "noise within and in the likelihood": {**ONE_PASS, "likelihood": random_noise},
}
BY_MODEL = {
    "other inputs": {"wrap": lambda model: Wrapped(model, shift=1.0)},
    "a site fixed": {"wrap": lambda model: Wrapped(model, fixed={"4.bias": BIAS})},
    "a hook": {"wrap": scaled},
    "a likelihood of its own": {"likelihood": Tempered},
    "a handler": {"wrap": lambda model: poutine.scale(model, 2.0)},
}


def problem(wrap=lambda model: model, net=mlp, prior=lambda: dist.Normal(0.0, 1.0), likelihood=None, guide=AutoRadial):
    pyro.set_rng_seed(0)
    likelihood = (likelihood or likelihoods.Categorical)()
    model = wrap(SupervisedModel(BayesianModule(net(), prior()), likelihood))
    guide = guide(model)
    y = torch.zeros(POINTS, CLASSES) if isinstance(likelihood, likelihoods.Gaussian) else torch.zeros(POINTS).long()
    guide(X, y)
    return model, guide


@pytest.mark.parametrize("kind", BY_NETWORK | BY_MODEL)
def test_predictions_are_those_of_runs_of_the_model(kind, monkeypatch):
    options = {"chunk_size": 9, **(BY_NETWORK | BY_MODEL)[kind]}
    size = options.pop("chunk_size")
    rows, values = [], PREDICT_MODULE._NetworkRun.values

    def counted(self, inputs):
        computed = values(self, inputs)
        rows.extend([len(inputs)] * len(computed))
        return computed

    monkeypatch.setattr(PREDICT_MODULE._NetworkRun, "values", counted)
    model, guide = problem(**options)
    prediction = draws(model, guide, chunk_size=size)
    state = torch.get_rng_state()
    assert len(rows) == (6 * -(-POINTS // size) if kind in BY_NETWORK else 0)
    monkeypatch.setattr(PREDICT_MODULE, "find_network", lambda model: None)
    expected = draws(model, guide, chunk_size=size)
    if kind == "noise within":
        # Draws run at once, with other masks: half of the outputs are zero, and twice as large where they are not.
        both = (prediction.samples != 0) & (expected.samples != 0)
        assert 0.15 < float(both.float().mean()) < 0.35
        assert torch.allclose(prediction.samples[both], expected.samples[both], atol=1e-6)
    else:
        assert torch.allclose(prediction.samples, expected.samples, atol=1e-6)
    assert prediction.noise.keys() == expected.noise.keys()
    assert all(torch.equal(prediction.noise[name], value) for name, value in expected.noise.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert float((prediction.samples[0] - prediction.samples[1]).abs().max()) > 1e-4


def test_a_handler_around_the_call_acts_on_every_draw():
    model, guide = problem(likelihood=likelihoods.Gaussian)
    with mean_only():
        samples = draws(model, guide).samples
    with torch.no_grad():
        expected = model.bnn.to_module(guide.median()).eval()(X)
    assert torch.allclose(samples, expected.expand_as(samples), atol=1e-6)
