# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A small trained network, its model and rows that the tests of what is done after training share."""

import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods


def labels(x):
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def overfitted(steps=200):
    """``(network, model, training rows, validation rows)``: a network of three classes that is too sure of itself."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    x, x_validation = torch.randn(60, 5), torch.randn(200, 5)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), labels(x)).backward()
        optimizer.step()
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    return network, model, (x, labels(x)), (x_validation, labels(x_validation))


def guide_of(make, network, model, data):
    """A guide with the network's values as its means."""
    guide = make(model)
    guide.setup(*data)
    guide.load_means(network.state_dict())
    return guide
