# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Regression on UCI sets under functional priors: fitted processes and scores."""

import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import gpytorch.kernels as kernels
import torch
from torch import Tensor

from benchmarks.common import Pair, Row
from pyro_radial.functional import GaussianProcess

SMALL_SETS = ("boston", "concrete", "energy", "wine", "yacht")
MOST_ROWS = 3_000
LEVEL = 0.95


def unfitted_prior(rows: Pair) -> GaussianProcess:
    """A process with an RBF kernel, and a length for each input."""
    width = rows[0].shape[1]
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=width))
    kernel.base_kernel.lengthscale = width**0.5
    return GaussianProcess(kernel)


def kept_prior(rows: Pair, setting: Row, path: Path) -> tuple[GaussianProcess, float]:
    """A process of the highest marginal likelihood and the seconds its fit took.

    They come from a file where another method has fitted it to these rows.
    """
    if not path.exists():
        start = time.process_time()
        prior = unfitted_prior(rows)
        prior.fit(*rows, num_points=setting["prior_points"], steps=setting["prior_steps"])
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        torch.save({"prior": prior.state_dict(), "seconds": time.process_time() - start}, half)
        half.replace(path)
    saved, prior = torch.load(path, weights_only=True), unfitted_prior(rows)
    prior.load_state_dict(saved["prior"])
    return prior, saved["seconds"]


class Scored(NamedTuple):
    """What a method says of test targets, in standardized units."""

    mean: Tensor
    log_prob: Tensor
    #: Whether each lies between the ends of its interval.
    covered: Tensor

    def row(self, y: Tensor, unit: float) -> Row:
        """The results in the units of the targets."""
        return {
            "rmse": unit * float((self.mean - y).square().mean().sqrt()),
            # A density of standardized targets is per standardized unit.
            "log_likelihood": float(self.log_prob.mean()) - math.log(unit),
            "coverage": float(self.covered.double().mean()),
        }


def of_normal(mean: Tensor, variance: Tensor, y: Tensor) -> Scored:
    predictive = torch.distributions.Normal(mean, variance.sqrt())
    probability = predictive.cdf(y.double())
    covered = (probability - 0.5).abs() <= LEVEL / 2
    return Scored(mean, predictive.log_prob(y.double()), covered)


def exact_prediction(prior: GaussianProcess, train_rows: Pair, test: Pair) -> Scored:
    """The exact process of at most so many rows."""
    x, y = (part[:MOST_ROWS] for part in shuffled(train_rows))
    moments = [prior.posterior(x, y, part) for part in test[0].split(1_000)]
    mean = torch.cat([m for m, _ in moments])
    variance = torch.cat([c[0].diagonal() for _, c in moments])[:, None] + prior.observation_noise.square()
    return of_normal(mean, variance, test[1])


def shuffled(rows: Pair) -> Pair:
    order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(0))
    return rows[0][order], rows[1][order]
