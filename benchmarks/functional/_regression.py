# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Regression on UCI sets under functional priors: settings, fitted processes, training and scores."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gpytorch.kernels as kernels
import torch
from pyro.nn import PyroParam
from torch import Tensor, nn

from benchmarks.common import Pair, Row
from benchmarks.functional._training import network, train, weight_space
from pyro_radial import BayesianModule, FunctionalELBO, SupervisedModel, TermsELBO, predict
from pyro_radial.functional import (
    BetweenRows,
    GaussianProcess,
    LinearizedKL,
)
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn

SMALL_SETS = ("boston", "concrete", "energy", "wine", "yacht")
MOST_ROWS = 3_000
LEVEL = 0.95
DEFAULT: Row = {
    "hidden": [50, 50],
    "activation": "SiLU",
    "batch_size": 100,
    "divergence": "LinearizedKL",
    "measurement_points": "between rows",
    "num_points": 50,
    "num_functions": 8,
    "pretrain_epochs": 0,
    "steps": 4_000,
    "lr": 0.015,
    "rates": [[0.4, 1.0], [0.3, 0.3], [0.3, 0.05]],
    "init_stddev": 0.01,
    "prior_noise": 0.01,
    "init_noise": 0.5,
    "times_noise": 3.0,
    "noise_lr": 0.05,
    "weigh_up": 0.5,
    "prior_steps": 1_000,
    "prior_points": 500,
}
FORMS: dict[str, Row] = {
    "default": DEFAULT,
    "small": DEFAULT | {"hidden": [10], "steps": 10, "prior_steps": 10, "num_points": 10},
}


def fitted_prior(rows: Pair, setting: Row) -> GaussianProcess:
    """A process with an RBF kernel, and a length for each input, of the highest marginal likelihood."""
    prior = unfitted_prior(rows)
    prior.fit(*rows, num_points=setting["prior_points"], steps=setting["prior_steps"])
    return prior


def unfitted_prior(rows: Pair) -> GaussianProcess:
    width = rows[0].shape[1]
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=width))
    kernel.base_kernel.lengthscale = width**0.5
    return GaussianProcess(kernel)


def kept_prior(rows: Pair, setting: Row, path: Path) -> tuple[GaussianProcess, float]:
    """A fitted process and the seconds its fit took, from a file where another method has fitted it to these rows."""
    if not path.exists():
        start = time.process_time()
        prior = fitted_prior(rows, setting)
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


def of_network(model: SupervisedModel, guide: nn.Module, test: Pair, num_samples: int) -> Scored:
    x, y = test
    draws = predict(model, guide, x, num_samples=num_samples)
    low, high = draws.quantiles([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Scored(draws.mean, draws.log_prob(y), (low <= y) & (y <= high))


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


def trained(
    rows: Pair, setting: Row, prior: GaussianProcess | None, checkpoint: Path
) -> tuple[SupervisedModel, nn.Module]:
    """A network under a process that was fitted to the rows, or without one, under a prior on its weights."""
    x = rows[0]
    batch_size = min(setting["batch_size"], len(x))
    net = network(x.shape[1], setting["hidden"], getattr(nn, setting["activation"]))
    make_loss: Callable[[Callable[[int], float]], TermsELBO]
    kl_weight = 1.0
    if prior is not None:
        noise = noise_above(prior.observation_noise, setting["times_noise"], len(x))
        model = SupervisedModel(BayesianModule(net), noise)
        noisy = GaussianProcess(prior.kernel, noise=setting["prior_noise"])
        kl_weight = (len(x) / batch_size) ** setting["weigh_up"]
        loss = functional_loss(noisy, x, setting)

        def make_loss(kl_weight: Callable[[int], float]) -> TermsELBO:
            return loss(kl_weight=kl_weight)

    else:
        likelihood = likelihoods.Gaussian(num_data=len(x), scale=setting["init_noise"], learn_scale=True)
        model = SupervisedModel(BayesianModule(net, FanIn()), likelihood)
        make_loss = weight_space

    guide = train(
        model,
        rows,
        make_loss,
        steps=setting["steps"],
        lr=setting["lr"],
        rates=setting["rates"],
        batch_size=batch_size,
        checkpoint=checkpoint,
        kl_weight=kl_weight,
        init_stddev=setting["init_stddev"],
        noise_lr=setting["noise_lr"],
    )
    return model, guide


def functional_loss(noisy: GaussianProcess, x: Tensor, setting: Row) -> Callable[..., FunctionalELBO]:
    """The loss of a setting, without the weight of its divergence."""
    points = BetweenRows(x, setting["num_points"])
    functions = setting["num_functions"]
    return partial(FunctionalELBO, noisy, points, divergence=LinearizedKL(), num_functions=functions)


def noise_above(floor: Tensor, times: float, num_data: int) -> likelihoods.Gaussian:
    """A likelihood whose noise is learned from so many times a number, and stays above it."""
    likelihood = likelihoods.Gaussian(num_data=num_data, learn_scale=True)
    constraint = torch.distributions.constraints.greater_than(float(floor))
    likelihood.scale = PyroParam(torch.tensor(times * float(floor)), constraint)
    return likelihood
