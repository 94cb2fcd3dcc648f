# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small regressions with local reparameterization, and what their losses are."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.nn import likelihoods

NUM_ROWS = 8
GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(NUM_ROWS, 3, generator=GENERATOR), torch.randn(NUM_ROWS, 2, generator=GENERATOR)

GUIDES = {
    "radial": partial(AutoRadial, init_stddev=0.2),
    "radial rows": partial(AutoRadial, init_stddev=0.2, event_dim=1),
    "mean field": partial(AutoMeanField, init_stddev=0.2),
}
each_guide = pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)

LOSSES = {
    "TermsELBO": TermsELBO,
    "two particles": partial(TermsELBO, 2),
    "vectorized": partial(TermsELBO, 3, vectorize_particles=True, max_plate_nesting=1),
    "TraceMeanField_ELBO": TraceMeanField_ELBO,
    "TraceMeanField_ELBO, vectorized": partial(
        TraceMeanField_ELBO, num_particles=3, vectorize_particles=True, max_plate_nesting=1
    ),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def mlp():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def regression(net=None, *, local_reparameterization=True, prior=None):
    bnn = BayesianModule(net or nn.Linear(3, 2), *([] if prior is None else [prior]))
    return SupervisedModel(bnn, likelihoods.Gaussian(scale=0.5), local_reparameterization=local_reparameterization)


def closed_loss(guide, times):
    """The loss of a linear regression on rows that are there so many times; its expected squares are known."""
    posterior = guide_posterior(guide)
    weight, bias = posterior["weight"], posterior["bias"]
    squares = (Y - X @ weight.mean.T - bias.mean).square() + X.square() @ weight.variance.T + bias.variance
    scale = 0.5
    nll = 0.5 * squares / scale**2 + math.log(scale) + 0.5 * math.log(2 * math.pi)
    prior = {name: dist.Normal(0.0, 1.0).expand(q.shape()).to_event(q.event_dim) for name, q in posterior.items()}
    kl = sum(torch.distributions.kl_divergence(q, prior[name]) for name, q in posterior.items())
    return times * nll.sum() + kl


def guide_posterior(guide):
    """The distributions of the guide, not detached."""
    trace = pyro.poutine.trace(guide).get_trace(X)
    return {name: trace.nodes[name]["fn"] for name in ("weight", "bias")}


def losses(module, count, *args):
    """As many evaluations of a loss and its gradient."""
    parameters = list(module.parameters())
    rows = []
    for _ in range(count):
        loss = module(*args)
        gradients = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([loss.detach().reshape(1), *(g.flatten() for g in gradients)]))
    return torch.stack(rows)
