# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model, and a training to convergence, that the tests of guides share."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO


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
