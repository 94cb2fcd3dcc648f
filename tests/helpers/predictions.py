# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A small trained problem with its draws, and class probabilities that are calibrated."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.nn import likelihoods

POINTS, CLASSES = 23, 3
X = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(1))
GAMMA = dist.Gamma(6.0, 6.0)


def problem(likelihood=None, net=None, y=None, guide=AutoRadial, **kwargs):
    model = SupervisedModel(
        BayesianModule(net or nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, CLASSES))),
        likelihood or likelihoods.Categorical(num_data=POINTS),
    )
    made = guide(model, **({"init_stddev": 0.5} if guide is AutoRadial else {}), **kwargs)
    made(X, torch.zeros(POINTS, dtype=torch.long) if y is None else y)
    return model, made


def draws(model, guide, x=X, seed=7, **kwargs):
    pyro.set_rng_seed(seed)
    return predict(model, guide, x, **{"num_samples": 6, **kwargs})


def simulate(num_points, num_classes, seed=0):
    """Probabilities and labels drawn from them, so the probabilities are calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_points, num_classes, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]
