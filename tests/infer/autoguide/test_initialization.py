# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.autoguide import init_to_network
from pyro_radial.nn import likelihoods

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_the_default_start_of_a_network_is_its_own_weights():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=10))
    for guide in (AutoRadial(model), AutoMeanField(model)):
        guide.setup(X, torch.randn(6, 1))
        for name, parameter in net.named_parameters():
            assert torch.equal(guide.median()[name], parameter)


def test_init_to_network_takes_another_networks_weights():
    net, trained = nn.Linear(4, 2), nn.Linear(4, 2)
    guide = AutoRadial(BayesianModule(net), init_loc_fn=init_to_network(net=trained))
    guide.setup(X)
    assert torch.equal(guide.median()["weight"], trained.weight)


def test_weights_inside_a_plate_all_start_at_the_network():
    bnn = BayesianModule(nn.Linear(4, 2))

    def model(x):
        with pyro.plate("members", 3, dim=-2):
            bnn(x)

    guide = AutoRadial(model)
    guide.setup(X)
    assert guide.median()["weight"].shape == (3, 1, 2, 4)
    assert torch.equal(guide.median()["weight"][2, 0], bnn._initial["weight"])
