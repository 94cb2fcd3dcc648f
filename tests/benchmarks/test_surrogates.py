# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The surrogates of the experiment on Bayesian optimization, and its loop."""

import math

import pytest
import torch

pytest.importorskip("botorch")

from benchmarks.decisions import optimization
from benchmarks.decisions._surrogates import (
    RandomFeatures,
)
from benchmarks.decisions.optimization import Problem, Size, optimized


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
