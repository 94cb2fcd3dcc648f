# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The surrogates of the experiment on Bayesian optimization, and its loop."""

import math

import pytest
import torch

pytest.importorskip("botorch")

from benchmarks.decisions._surrogates import (
    RandomFeatures,
)


def test_random_features_have_the_posterior_of_a_gaussian_process():
    # With many features the process is that of the kernel they are of.
    torch.manual_seed(0)
    surrogate = RandomFeatures()
    surrogate.num_features = 1500
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
