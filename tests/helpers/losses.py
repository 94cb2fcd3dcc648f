# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A small model, and comparisons of losses in expectation, that the tests of losses share."""

import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR)


def network(prior=None, num_data=40):
    bnn = BayesianModule(nn.Linear(3, 1), *([] if prior is None else [prior]))
    return SupervisedModel(bnn, likelihoods.Gaussian(num_data=num_data))


def mean_and_error(loss, model, guide, *args, count=200):
    with torch.no_grad():
        draws = torch.tensor([float(loss.loss(model, guide, *args)) for _ in range(count)])
    return draws.mean(), draws.std() / count**0.5


def assert_same_in_expectation(first, second, model, guide, *args):
    (a, a_error), (b, b_error) = (mean_and_error(loss, model, guide, *args) for loss in (first, second))
    assert abs(a - b) <= 4 * (a_error**2 + b_error**2).sqrt() + 1e-5 * abs(a)
