# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.functional``."""

import math
from functools import cache

import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, functional
from pyro_radial.functional import FunctionPrior, GaussianProcess, PosteriorProcess, UniformBox
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Lazy, Row, some

NAN = math.nan
X = torch.linspace(0, 1, 5).unsqueeze(-1)
Y = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.5])
F = torch.linspace(-1, 1, 15).reshape(3, 5, 1).sin()


def process():
    return GaussianProcess(RBF(1), noise=0.1)


def noisy():
    found = process()
    found.observation_noise.fill_(0.1)
    return found


def implicit():
    return functional.ImplicitProcess(lambda x, number: torch.randn(number, len(x)))


def box():
    return UniformBox(-1.0, 1.0, num_points=4)


def network():
    return BayesianModule(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))


@cache
def model_and_guide():
    model = SupervisedModel(network(), likelihoods.Gaussian(num_data=5, scale=0.1))
    guide = AutoMeanField(model)
    guide.setup(X, X)
    return model, guide


@cache
def posterior_process():
    bnn = network()
    guide = AutoRadial(bnn)
    guide.setup(torch.zeros(2, 1))
    return PosteriorProcess(bnn, guide.posterior())


def points_of_posterior():
    posterior = model_and_guide()[1].posterior()
    return {name: dist.Delta(q.mean).to_event(q.mean.dim()) for name, q in posterior.items()}


def loss_of(elbo):
    """The loss of a small network, for arguments that are read only then."""
    model, guide = model_and_guide()
    return elbo(model, guide)(X, X)


class OfMoments(FunctionPrior):
    """A prior of one's own."""

    def moments(self, x, num_outputs=1):
        return torch.zeros(len(x), num_outputs).double(), torch.eye(len(x)).double().expand(num_outputs, -1, -1)


SAMPLED = {"own": OfMoments, "process": process, "implicit": implicit, "posterior": posterior_process}
observations = some(Y[:, None, None])
at_data = dict(y=observations, at={"another width": X.expand(5, 2)})
other_values = some(F[:, :4], F[0])

ROWS = [
    Row("functional.GaussianProcess", lambda: dict(kernel=RBF(1)), dict(kernel=some([]))),
    Row("functional.GaussianProcess.log_marginal_likelihood", lambda: dict(x=X, y=Y), dict(y=observations), on=noisy),
    Row("functional.GaussianProcess.posterior", lambda: dict(x=X, y=Y, at=X + 0.1), at_data, on=noisy),
    Row(
        "functional.GaussianProcess.fit",
        lambda: dict(x=X, y=Y, num_points=4, steps=2),
        dict(y=observations, observation_noise={"zero": 0.0}),
        on=process,
    ),
    Row(
        "functional.ImplicitProcess",
        lambda: dict(sampler=lambda x, number: torch.randn(number, len(x))),
        then=lambda prior: prior.sample(X, 3),
    ),
    Row(
        "functional.PosteriorProcess",
        lambda: dict(model=model_and_guide()[0], posterior=model_and_guide()[1].posterior()),
        dict(posterior=some({}, Lazy(points_of_posterior))),
        takes=dict(function_site=("no such name",)),
        then=lambda prior: prior.marginals(X),
    ),
    *(
        Row(f"functional.PosteriorProcess.{method}", lambda: dict(x=X), dict(num_outputs=some(2)), on=posterior_process)
        for method in ("moments", "marginals")
    ),
    *(
        Row("functional.FunctionPrior.sample", lambda: dict(x=X, num_samples=3), on=make, case=case)
        for case, make in SAMPLED.items()
    ),
    *(
        Row(f"functional.FunctionPrior.{method}", lambda: dict(f=F, x=X), dict(f=other_values), on=process)
        for method in ("score", "log_prob")
    ),
    Row("functional.GaussianProcess.moments", lambda: dict(x=X), on=process),
    Row("functional.GaussianKL"),
    Row("functional.SteinKL"),
    Row("functional.LinearizedKL", takes=dict(gamma=("zero",))),
    *(
        Row(
            f"functional.{name}.__call__",
            lambda: dict(f=torch.randn(30, 5, 1), x=X, prior=process()),
            dict(f=other_values),
            on=make,
        )
        for name, make in (("GaussianKL", functional.GaussianKL), ("SteinKL", functional.SteinKL))
    ),
    Row(
        "functional.LinearizedKL.__call__",
        lambda: dict(process=process(), x=X, prior=process()),
        on=functional.LinearizedKL,
    ),
    Row(
        "functional.init_to_prior",
        lambda: dict(network=nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)), prior=process(), points=X),
        dict(network=some(nn.Linear(2, 1), nn.Tanh(), nn.Conv1d(1, 1, 1))),
    ),
    Row(
        "functional.function_space_laplace",
        lambda: dict(
            **dict(zip(("model", "trained"), model_and_guide(), strict=True)),
            data=(X, Y[:, None]),
            prior=process(),
            points=X,
            num_steps=0,
        ),
    ),
    Row(
        "functional.UniformBox",
        lambda: dict(low=-1.0, high=[1.0, 2.0], num_points=3),
        dict(low=some(3.0, NAN, [0.0, 0.0, 0.0]), high=some(-3.0, NAN)),
        takes=dict(high=("empty",)),
    ),
    Row("functional.UniformBox.around", lambda: dict(x_train=X.repeat(1, 2), num_points=5)),
    Row("functional.UniformBox.__call__", lambda: dict(x=X), takes=dict(x=("all nan", "no rows")), on=box),
    Row("functional.BetweenRows", lambda: dict(points=X, num_points=3)),
    Row(
        "functional.BetweenRows.__call__",
        lambda: dict(x=X),
        takes=dict(x=("all nan", "no rows")),
        on=lambda: functional.BetweenRows(X, 3),
    ),
    Row(
        "functional.FunctionalELBO",
        lambda: dict(prior=process(), measurement_points=box(), divergence=functional.GaussianKL(), num_functions=30),
        dict(measurement_points=some(lambda x: x[:, 0], lambda x: x.expand(5, 2), lambda x: x * NAN)),
        takes=dict(function_site=("no such name",)),
        then=loss_of,
    ),
]
