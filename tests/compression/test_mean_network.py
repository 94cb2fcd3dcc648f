# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The plain network in the middle of a posterior."""

import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadialDirectional, BayesianModule
from pyro_radial.compression import mean_network
from pyro_radial.nn.priors import RadialDirectionalPrior

X = torch.zeros(1, 3)


def test_its_weights_are_the_mean_of_the_posterior_where_radii_are_sure():
    bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior())
    guide = AutoRadialDirectional(bnn, init_stddev=1e-4, init_mean_cosine=0.6)
    guide.setup(X)
    draws = torch.stack([bnn.to_module(guide(X)).weight.detach() for _ in range(4_000)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - mean_network(bnn, guide).weight).abs() <= 4 * error).all()


def test_a_group_whose_direction_dissolved_is_zero():
    bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior())
    guide = AutoRadialDirectional(bnn, shared_concentration=False)
    guide.setup(X)
    with torch.no_grad():
        guide.concentrations.weight.direction_unconstrained[2] = -40.0
    weight = mean_network(bnn, guide).weight
    assert weight[2].abs().max() < 1e-12
    assert weight[[0, 1, 3]].norm(dim=1).min() > 0.01


def test_without_directions_it_is_the_network_at_the_median():
    bnn = BayesianModule(nn.Linear(3, 4))
    guide = AutoMeanField(bnn)
    guide.setup(X)
    assert torch.equal(mean_network(bnn, guide).weight, guide.median()["weight"])
