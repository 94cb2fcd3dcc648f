# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Models whose functions are linear in their weights, and posteriors of these, in double precision."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.distributions import RadialNormal
from pyro_radial.nn import likelihoods

WIDTH = 5


def features(x):
    return torch.cat([x, x.square(), (2 * x).sin()], -1)[:, :WIDTH]


def inputs(number=7):
    return torch.randn(number, 2, dtype=torch.double)


def by_hand(x, y=None):
    """A regression written by hand: two outputs, each with weights of its own, and a noise that is not known."""
    noise = pyro.sample("noise", dist.Gamma(torch.tensor(3.0, dtype=torch.double), 3.0))
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(2, WIDTH), 1.0).to_event(2))
    with pyro.plate("data", len(x), dim=-1):
        f = pyro.deterministic("f", features(x) @ weight.mT, event_dim=1)
        pyro.sample("y", dist.Normal(f, noise).to_event(1), obs=y)


class Features(nn.Module):
    def forward(self, x):
        return features(x)


def network(bias=True):
    """The same function as a network, as a model with known noise."""
    net = nn.Sequential(Features(), nn.Linear(WIDTH, 2, bias=bias)).double()
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=20, scale=0.3))


def posterior(kind, name):
    """A posterior of the weights ``[2, 5]``, its mean, and its covariances ``[2, 5, 5]``, one for each output."""
    mean = torch.randn(2, WIDTH, dtype=torch.double)
    if kind == "full":
        root = torch.randn(2, WIDTH, WIDTH, dtype=torch.double)
        covariance = root @ root.mT / WIDTH
        return {name: dist.MultivariateNormal(mean, covariance).to_event(1)}, mean, covariance
    scale = 0.1 + torch.rand(2, WIDTH, dtype=torch.double)
    if kind == "radial":
        return {name: RadialNormal(mean, scale, event_dim=2)}, mean, torch.diag_embed(scale.square() / (2 * WIDTH))
    return {name: dist.Normal(mean, scale).to_event(2)}, mean, torch.diag_embed(scale.square())


def of_functions(mean, covariance, x):
    """Mean and covariances of the functions of a posterior."""
    phi = features(x)
    return phi @ mean.mT, phi @ covariance @ phi.mT
