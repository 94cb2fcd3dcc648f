# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A linear regression with known noise and a prior N(0, 1): its best posterior with independent weights is known."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods


def regression(features: int, noise: float) -> SupervisedModel:
    """Return the model of one output; its site is ``"weight"``."""
    net = nn.Linear(features, 1, bias=False)
    return SupervisedModel(BayesianModule(net, dist.Normal(0.0, 1.0)), likelihoods.Gaussian(scale=noise))


def distances(guide: Any, x: Tensor, y: Tensor, noise: float) -> tuple[float, float]:
    """How far a guide is from the best posterior: means in its standard deviations, and logarithms of widths.

    Both are root mean squares over the weights.
    """
    x, y = x.double(), y.double()
    precision = x.T @ x / noise**2 + torch.eye(x.shape[1], dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.T @ y / noise**2).flatten()
    stddev = precision.diagonal().rsqrt()
    weight = guide.posterior()["weight"]
    mean_errors = (weight.mean.flatten() - mean) / stddev
    width_errors = (weight.stddev.flatten() / stddev).log()
    return float(mean_errors.square().mean().sqrt()), float(width_errors.square().mean().sqrt())
