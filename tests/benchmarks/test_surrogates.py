# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The surrogates of the experiment on Bayesian optimization, and its loop."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn

pytest.importorskip("botorch")

from benchmarks.decisions import optimization
from benchmarks.decisions._surrogates import (
    GaussianProcessSurrogate,
    LaplaceSurrogate,
    NetworkSurrogate,
    RandomFeatures,
    max_value_entropy,
    thompson,
)
from benchmarks.decisions.optimization import Problem, Size, optimized
from pyro_radial import AutoRadial, BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.functional import GaussianProcess, UniformBox, init_to_prior
from pyro_radial.nn import likelihoods
from tests.helpers.divergences import MarginalKL


def network(steps=30, functional=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    likelihood = likelihoods.Gaussian(scale=0.1)
    model = SupervisedModel(BayesianModule(net), likelihood, local_reparameterization=not functional)
    options = {"optim": partial(torch.optim.Adam, lr=3e-3)}
    if functional:
        box = UniformBox(0.0, 1.0, 8)
        options["loss"] = FunctionalELBO(
            GaussianProcess(near), box, divergence=MarginalKL(), compare_at="measurement_points", num_functions=1
        )
    return NetworkSurrogate(model, AutoRadial(model), 2, steps=steps, batch_size=16, compile=False, **options)


def near(a, b):
    return torch.exp(-2.0 * torch.cdist(a, b).square())


def laplace():
    torch.manual_seed(0)
    prior, points = GaussianProcess(near), torch.rand(60, 2).double()
    net = nn.Sequential(nn.Linear(2, 60), nn.SiLU(), nn.Linear(60, 1)).double()
    return LaplaceSurrogate(init_to_prior(net, prior, points), 0.1, prior, points, 20)


SURROGATES = {
    "Gaussian process": GaussianProcessSurrogate,
    "random features": lambda: RandomFeatures(100),
    "radial": network,
    "functional": lambda: network(functional=True),
    "function-space Laplace": laplace,
}


@cache
def trained(make):
    torch.manual_seed(0)
    surrogate = make()
    x = torch.rand(6, 2).double()
    y = -(x - 0.5).square().sum(1, keepdim=True)
    surrogate.refit(x, (y - y.mean()) / y.std())
    return surrogate


@pytest.mark.parametrize("acquisition", [thompson, max_value_entropy])
@pytest.mark.parametrize("make", SURROGATES.values(), ids=SURROGATES)
def test_every_acquisition_runs_on_every_surrogate(make, acquisition):
    found = acquisition(trained(make), 2)
    at = torch.rand(3, 1, 2).double().requires_grad_()
    value = found(at)
    assert value.shape == (3,)
    assert value.isfinite().all()
    (gradient,) = torch.autograd.grad(value.sum(), at)
    assert gradient.isfinite().all()
    assert (gradient != 0).any()


def test_function_space_laplace_is_the_process_that_is_its_prior_in_moments_and_in_draws():
    surrogate, (x, at) = laplace(), torch.rand(2, 30, 2, generator=torch.Generator().manual_seed(1)).double()
    y = (3.0 * x).sin().sum(1, keepdim=True)
    surrogate.refit(x[:6], y[:6])
    exact = GaussianProcess(near)
    exact.observation_noise.fill_(0.1)
    mean, covariance = exact.posterior(x[:6], y[:6], at)
    stddev = covariance[0].diagonal().sqrt().unsqueeze(-1)
    posterior = surrogate.normal().posterior(at.unsqueeze(1))
    assert ((posterior.mean.squeeze(1) - mean) / stddev).abs().max() < 0.2
    assert (posterior.variance.squeeze(1).sqrt() / stddev).log().abs().max() < 0.2
    draws = surrogate.draws(400)(at).squeeze(-1)
    # Four standard errors of a mean, and of a standard deviation, of 400 draws.
    own = posterior.variance.squeeze(1).sqrt()
    assert ((draws.mean(0).unsqueeze(-1) - posterior.mean.squeeze(1)) / own).abs().max() < 4 / 400**0.5
    assert (draws.std(0).unsqueeze(-1) / own - 1.0).abs().max() < 4 / 800**0.5


def test_random_features_have_the_posterior_of_a_gaussian_process():
    # With many features the process is that of the kernel they are of.
    torch.manual_seed(0)
    surrogate = RandomFeatures(1500)
    x = torch.rand(8, 1).double()
    surrogate.refit(x, (6 * x).sin())
    process = surrogate.process
    lengthscale = 1 / process.frequencies.square().mean().sqrt()
    kernel = lambda a, b: process.scale.square() * 750 * torch.exp(-0.5 * ((a - b.T) / lengthscale).square())  # noqa: E731
    at = torch.rand(4, 1).double()
    gram = kernel(x, x) + process.noise * torch.eye(8).double()
    solved = torch.linalg.solve(gram, kernel(x, at))
    mean = process.offset + solved.T @ ((6 * x).sin() - process.offset)
    covariance = kernel(at, at) - kernel(at, x) @ solved
    found = surrogate.normal().posterior(at)
    unit = float(kernel(at, at)[0, 0])
    assert torch.allclose(found.mean, mean, atol=0.1 * math.sqrt(unit))
    assert torch.allclose(found.distribution.covariance_matrix, covariance, atol=0.05 * unit)
    draws = surrogate.draws(4000).posterior(at).values.squeeze(-1)
    spread = found.variance.squeeze(-1).sqrt()
    assert ((draws.mean(0) - found.mean.squeeze(-1)).abs() < 5 * spread / math.sqrt(4000)).all()
    assert torch.allclose(draws.std(0), spread, rtol=0.1)


METHODS = {optimization.CHANCE: "none", optimization.GP: "Thompson", "radial": "MES"}


@pytest.mark.parametrize("method", METHODS)
def test_an_optimization_finds_the_maximum_from_the_same_first_points(method, monkeypatch):
    def objective(x):
        seen.append(x)
        return -(x[0] - 0.4).square() - 0.1 * (x[1] - 1.0).square()

    seen = []
    problem = Problem(objective, [[-1.0, 0.0], [1.0, 4.0]], 0.0, optimization.rbf, True)
    monkeypatch.setattr(optimization, "problem_of", lambda *_: problem)
    size = Size(evaluations=12, initial=5, layers=1, width=10, steps=5, compile=False)
    keys = {"problem": "Branin", "method": method, "acquisition": METHODS[method], "width": 10, "seed": 3}
    row = optimized(keys, size)
    first, seen = seen[:5], []
    optimized({**keys, "method": optimization.CHANCE, "acquisition": "none"}, size)
    assert torch.equal(torch.stack(first), torch.stack(seen[:5]))
    assert len(row["curve"]) == 12
    assert row["curve"] == sorted(row["curve"], reverse=True)
    assert row["regret"] >= 0
    assert row["steps_per_proposal"] == (5 if method == "radial" else 0)
    if method == optimization.GP:
        assert row["regret"] < 0.01
