# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The network of a model is found by types, and gives what the model gives for a draw of the guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, PriorChain, SupervisedModel
from pyro_radial.nn import likelihoods
from pyro_radial.nn.supervised import find_network, network_of
from pyro_radial.poutine import swap_prior

GAMMA = dist.Gamma(6.0, 6.0)


def made():
    model = SupervisedModel(
        BayesianModule(nn.Linear(3, 2)), likelihoods.Gaussian(num_data=5, scale=None, precision_prior=GAMMA)
    )
    guide = AutoRadial(model)
    guide.setup(torch.zeros(5, 3), torch.zeros(5, 2))
    return model, guide


@pytest.mark.parametrize("wrap", [lambda model: model, PriorChain, lambda model: swap_prior(PriorChain(model), {})])
@torch.no_grad()
def test_parameters_and_noise_are_those_of_the_draw(wrap):
    model, guide = made()
    network = network_of(wrap(model))
    drawn = poutine.trace(guide).get_trace()
    draw = network.draw(drawn)
    assert network.bnn is model.bnn
    assert network.likelihood is model.likelihood
    assert draw.parameters.keys() == {"weight", "bias"}
    assert all(torch.equal(value, drawn.nodes[name]["value"]) for name, value in draw.parameters.items())
    assert torch.equal(draw.noise["scale"], drawn.nodes["precision"]["value"].rsqrt().reshape(1))
    assert {"weight", "bias", "precision", "noise_scale"} <= draw.trace.nodes.keys()
    x = torch.randn(4, 3)
    assert torch.equal(network(x, draw.parameters), poutine.condition(model.bnn, data=draw.parameters)(x))
    # The model runs as ever afterwards.
    assert wrap(model)(torch.zeros(4, 3)).shape == (4, 2)


@torch.no_grad()
def test_a_mistake_of_a_prior_is_shown_as_it_is():
    class Broken:
        def sample_parameter(self, name, parameter):
            raise KeyError(name)

    model = BayesianModule(nn.Linear(3, 2), Broken())
    with pytest.raises(KeyError, match="weight"):
        network_of(model).draw(poutine.Trace())
    assert not pyro.poutine.runtime._PYRO_STACK


class OwnForward(SupervisedModel):
    def forward(self, x, y=None):
        return super().forward(2 * x, y)


class OwnOutput(SupervisedModel):
    def output(self, x, parameters=None):
        return 2 * super().output(x, parameters)


class OwnChain(PriorChain):
    def forward(self, x, y=None):
        return super().forward(2 * x, y)


class OwnLikelihood(likelihoods.Gaussian):
    def forward(self, f, y=None):
        return super().forward(2 * f, y)


class OwnNetwork(BayesianModule):
    def forward(self, x):
        return 2 * super().forward(x)


def patched(model):
    plain = model.forward
    model.forward = lambda *args: plain(*args)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: OwnForward(model.bnn, model.likelihood),
        lambda model: OwnOutput(model.bnn, model.likelihood),
        lambda model: PriorChain(OwnForward(model.bnn, model.likelihood)),
        OwnChain,
        lambda model: SupervisedModel(model.bnn, OwnLikelihood()),
        lambda model: SupervisedModel(OwnNetwork(nn.Linear(3, 2)), model.likelihood),
        nn.Sequential,
        poutine.block,
        patched,
        lambda model: nn.ModuleList([model, made()[0]]),
    ],
)
def test_a_model_that_may_do_something_else_has_no_network(change):
    model = change(made()[0])
    assert find_network(model) is None
    with pytest.raises(ValueError, match="model must be a SupervisedModel of a BayesianModule"):
        network_of(model)


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.bnn, lambda model: model.likelihood])
@pytest.mark.parametrize("before", [False, True])
def test_a_network_whose_call_is_changed_by_a_hook_is_none(part, before):
    model, _ = made()
    register = part(model).register_forward_pre_hook if before else part(model).register_forward_hook
    handle = register(lambda *args: None)
    with pytest.raises(ValueError, match="without hooks, got SupervisedModel"):
        network_of(model)
    handle.remove()
    assert network_of(model).bnn is model.bnn
