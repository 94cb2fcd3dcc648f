# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small models, a training to convergence, and comparisons of losses in expectation."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods


def matrix_model(x=None):
    pyro.sample("weight", dist.Normal(0.0, 1.0).expand([5, 4]).to_event(2))
    pyro.sample("bias", dist.Normal(0.0, 1.0).expand([5]).to_event(1))


def train_to_convergence(model, guide, num_steps, num_particles, max_plate_nesting):
    """Adam with a step size that shrinks to nothing, so that its noise does too."""
    gamma = 0.001 ** (1 / num_steps)
    optim = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": gamma})
    elbo = TraceMeanField_ELBO(
        num_particles=num_particles, vectorize_particles=True, max_plate_nesting=max_plate_nesting
    )
    svi = SVI(model, guide, optim, elbo)
    for _ in range(num_steps):
        svi.step()
        optim.step()


GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR)


def network(prior=None, num_data=40):
    bnn = BayesianModule(nn.Linear(3, 1), *([] if prior is None else [prior]))
    return SupervisedModel(bnn, likelihoods.Gaussian(num_data=num_data))


def mean_and_error(loss, model, guide, *args, count=100):
    with torch.no_grad():
        draws = torch.tensor([float(loss.loss(model, guide, *args)) for _ in range(count)])
    return draws.mean(), draws.std() / count**0.5


def assert_same_in_expectation(first, second, model, guide, *args):
    (a, a_error), (b, b_error) = (mean_and_error(loss, model, guide, *args) for loss in (first, second))
    assert abs(a - b) <= 4 * (a_error**2 + b_error**2).sqrt() + 1e-5 * abs(a)
