# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a draw of a guide is to the network of a model."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, PriorChain, SupervisedModel
from pyro_radial.infer.prediction.model_network import ModelNetwork
from pyro_radial.nn import likelihoods

GAMMA = dist.Gamma(6.0, 6.0)


def made():
    model = SupervisedModel(
        BayesianModule(nn.Linear(3, 2)), likelihoods.Gaussian(num_data=5, scale=None, precision_prior=GAMMA)
    )
    guide = AutoRadial(model)
    guide.setup(torch.zeros(5, 3), torch.zeros(5, 2))
    return model, guide


@pytest.mark.parametrize("wrap", [lambda model: model, PriorChain, nn.Sequential])
@torch.no_grad()
def test_parameters_and_noise_are_those_of_the_draw(wrap):
    model, guide = made()
    network = ModelNetwork(wrap(model))
    drawn = poutine.trace(guide).get_trace()
    draw = network.draw(drawn)
    assert network.bnn is model.bnn
    assert network.likelihood is model.likelihood
    assert draw.parameters.keys() == {"weight", "bias"}
    assert all(torch.equal(value, drawn.nodes[name]["value"]) for name, value in draw.parameters.items())
    assert torch.equal(draw.noise["scale"], drawn.nodes["precision"]["value"].rsqrt().reshape(1))
    assert {"weight", "bias", "precision", "noise_scale"} <= draw.trace.nodes.keys()
    # The model runs as ever afterwards.
    assert wrap(model)(torch.zeros(4, 3)).shape == (4, 2)


@torch.no_grad()
def test_a_mistake_of_a_prior_is_shown_as_it_is():
    class Broken:
        def sample_parameter(self, name, parameter):
            raise KeyError(name)

    model = BayesianModule(nn.Linear(3, 2), Broken())
    with pytest.raises(KeyError, match="weight"):
        ModelNetwork(model).draw(poutine.Trace())
    assert not pyro.poutine.runtime._PYRO_STACK


def test_two_networks_are_none():
    with pytest.raises(ValueError, match="model must be a SupervisedModel of a BayesianModule"):
        ModelNetwork(nn.ModuleList([made()[0], made()[0]]))


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.bnn, lambda model: model.likelihood])
@pytest.mark.parametrize("before", [False, True])
def test_a_network_whose_call_is_changed_by_a_hook_is_none(part, before):
    model, _ = made()
    register = part(model).register_forward_pre_hook if before else part(model).register_forward_hook
    handle = register(lambda *args: None)
    with pytest.raises(ValueError, match="without hooks, got SupervisedModel"):
        ModelNetwork(model)
    handle.remove()
    assert ModelNetwork(model).bnn is model.bnn
