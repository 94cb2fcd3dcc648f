# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Thirteen kinds of programs that a compiled step records: guides, losses, networks, chains and priors on functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import Tensor, nn

from benchmarks.guides._examples.program import Program
from pyro_radial import (
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    FunctionalELBO,
    PriorChain,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.functional import GaussianKL, GaussianProcess, SteinKL, UniformBox
from pyro_radial.nn import likelihoods

ROWS, NUM_DATA = 16, 100


class ResidualNet(nn.Module):
    """Two convolutions with batch norm, the second around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(channels)
        self.last = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[B, 3]`` of images ``[B, 1, H, W]``."""
        hidden = torch.relu(self.first_norm(self.first(x)))
        hidden = torch.relu(hidden + self.second_norm(self.second(hidden)))
        logits: Tensor = self.last(hidden.mean((-1, -2)))
        return logits


def mlp(width: int, outputs: int) -> nn.Module:
    """One hidden layer on five inputs."""
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, outputs))


def labels() -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    return torch.randn(ROWS, 5), torch.randint(3, (ROWS,))


def classifier(make_guide: Callable[..., Any], loss: ELBO, width: int) -> Program:
    """A network with three classes."""
    model = SupervisedModel(BayesianModule(mlp(width, 3)), likelihoods.Categorical(num_data=NUM_DATA))
    return Program(model, make_guide(model), loss, labels())


def residual(width: int) -> Program:
    """Convolutions, and batch norm in train mode."""
    net = ResidualNet(max(2, width // 4))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=NUM_DATA))
    return Program(model, AutoRadial(model), TermsELBO(), (torch.randn(ROWS, 1, 6, 6), torch.randint(3, (ROWS,))))


def regression(make_guide: Callable[..., Any], loss: ELBO, width: int) -> Program:
    """A network with one output, under noise of which nothing is known."""
    model = SupervisedModel(BayesianModule(mlp(width, 1)), likelihoods.Gaussian(num_data=NUM_DATA))
    x = torch.randn(ROWS, 5)
    return Program(model, make_guide(model), loss, (x, x[:, :1].sin()))


def chain(form: Any, width: int) -> Program:
    """The second task of a chain."""
    model, _, _, args = classifier(AutoRadial, TermsELBO(), width)
    priors = chained(model, form, args)
    return Program(priors, priors.guide(AutoRadial), TermsELBO(strict_kl=True), args)


def chained(model: Any, form: Any, args: tuple[Tensor, ...]) -> PriorChain:
    """A model whose prior is a posterior with means and scales of its own."""
    priors = PriorChain(model, form=form)
    first = AutoRadial(priors, init_stddev=0.05)
    first.setup(*args)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    priors.advance(first)
    return priors


def regression_with_temperature(x: Tensor, y: Tensor) -> None:
    """Written by hand: a parameter of the model's own, and a plate that subsamples."""
    temperature = pyro.param("temperature", torch.tensor(0.5), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([5, 3]).to_event(2))
    with pyro.plate("data", len(x), subsample_size=len(x) // 2) as rows:
        pyro.sample("y", dist.Categorical(logits=(x[rows] @ w) / temperature), obs=y[rows])


def by_hand(width: int) -> Program:
    """The same with Pyro's guide and loss."""
    return Program(regression_with_temperature, AutoNormal(regression_with_temperature), Trace_ELBO(), labels())


def functional(divergence: Any, guide: Any, width: int) -> Program:
    """A prior on functions."""
    process = GaussianProcess(lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square()))
    box = UniformBox([-2.0] * 5, [2.0] * 5, num_points=6)
    loss = FunctionalELBO(process, box, divergence=divergence, num_functions=60)
    return regression(guide, loss, width)


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "AutoRadial, TermsELBO": partial(classifier, AutoRadial, TermsELBO(strict_kl=True)),
    "Pyro's AutoNormal, TraceMeanField_ELBO": partial(classifier, AutoNormal, TraceMeanField_ELBO()),
    "Pyro's AutoMultivariateNormal, Trace_ELBO": partial(classifier, AutoMultivariateNormal, Trace_ELBO()),
    "AutoRadialDirectional": partial(classifier, AutoRadialDirectional, TermsELBO()),
    "four particles, looped": partial(classifier, AutoRadial, TermsELBO(4)),
    "four particles, vectorized": partial(classifier, AutoRadial, TermsELBO(4, vectorize_particles=True)),
    "residual net with batch norm": residual,
    "learned noise": partial(regression, AutoRadial, TermsELBO()),
    "pyro.param and subsampling": by_hand,
    "PriorChain, normal": partial(chain, "normal"),
    "PriorChain, exact": partial(chain, "exact"),
    "FunctionalELBO": partial(functional, None, AutoRadial),
    "FunctionalELBO, SteinKL": partial(functional, SteinKL(), AutoRadial),
    "FunctionalELBO, GaussianKL, AutoMultivariateNormal": partial(functional, GaussianKL(), AutoMultivariateNormal),
}
