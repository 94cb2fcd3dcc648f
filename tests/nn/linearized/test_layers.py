# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which layers carry a network's noise; what they make of it is in the tests of linearizations."""

import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods
from pyro_radial.nn.bayesian_module import modules_of
from pyro_radial.nn.linearized.layers import linear_layers
from pyro_radial.nn.linearized.site_function import SiteFunction

X = torch.randn(1, 3)


def layers_of(model):
    (bnn,) = modules_of(BayesianModule, model)
    values = {name: torch.randn_like(value) for name, value in bnn.sample_parameters().items()}
    return linear_layers(SiteFunction(model), tuple(values), values, X)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))


def test_layers_are_known_by_their_places_and_sites():
    model = SupervisedModel(BayesianModule(net()), likelihoods.Categorical(num_data=9))
    assert layers_of(model) == (("0", "0.weight", "0.bias", (4,)), ("2", "2.weight", None, (2,)))


def test_what_is_not_random_has_no_site():
    model = BayesianModule(net(), select=r"weight")
    assert layers_of(model) == (("0", "0.weight", None, (4,)), ("2", "2.weight", None, (2,)))


def test_no_hook_stays():
    model = BayesianModule(net())
    layers_of(model)
    assert not any(module._forward_hooks for module in model.skeleton.modules())


def test_a_layer_with_a_forward_of_its_own_is_left_alone():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.weight.sum()

    assert layers_of(BayesianModule(Shifted(3, 2))) is None
