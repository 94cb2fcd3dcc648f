# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Piecewise functions given data, against weighted draws of the prior; normal ones, against a process."""

import pytest
import torch

from benchmarks.functional import _conditional
from pyro_radial.functional import GaussianProcess, PiecewiseConstant, PiecewiseLinear

NOISE, DRAWS = 0.1, 1000


@pytest.mark.parametrize(("kind", "places"), [(PiecewiseConstant, 100), (PiecewiseLinear, 40)])
def test_conditional_draws_have_the_moments_of_weighted_draws(kind, places, monkeypatch):
    """Within four standard errors of both, and what a change half a cell away does to the mean."""
    monkeypatch.setitem(_conditional.NUM_PLACES, kind, places)
    monkeypatch.setattr(_conditional, "NUM_VALUES", 51)
    torch.manual_seed(0)
    prior = kind()
    x, y = torch.tensor([[0.111], [0.333], [0.789]]), torch.tensor([[0.3], [0.4], [0.9]])
    grid = torch.tensor([[0.03], [0.213], [0.557], [0.683], [0.951]])
    drawn = prior.sample(torch.cat([x, grid]), 300_000).squeeze(-1).double()
    weights = (-(drawn[:, :3] - y.squeeze(-1)).square().sum(1) / (2 * NOISE**2)).softmax(0)
    mean = weights @ drawn[:, 3:]
    variance = weights @ (drawn[:, 3:] - mean).square()
    found = _conditional.conditional_draws(prior, (x, y), NOISE, grid, DRAWS)
    half_a_cell = 0.5 * prior.rate / places
    error = (variance * (1 / DRAWS + weights.square().sum())).sqrt()
    assert bool(((found.mean(0) - mean).abs() < 4 * error + half_a_cell * variance.sqrt()).all())
    assert bool(((found.std(0) / variance.sqrt() - 1).abs() < 4 * (0.5 / DRAWS) ** 0.5 + half_a_cell).all())


def test_normal_draws_of_a_process_are_those_of_its_posterior():
    torch.manual_seed(0)
    prior = GaussianProcess(lambda a, b: torch.exp(-0.5 * ((a - b.mT) / 0.4).square()))
    prior.observation_noise.fill_(NOISE)
    x, y = torch.tensor([[0.1], [0.4], [0.8]]), torch.tensor([[0.3], [-0.6], [0.9]])
    grid = torch.tensor([[0.0], [0.25], [0.6], [1.0]])
    mean, covariance = prior.posterior(x, y, grid)
    found = _conditional.normal_draws(prior, (x, y), NOISE, grid, 100_000)
    # The moments are those of 20,000 draws; an error of a covariance is amplified by the inverse of the data's.
    torch.testing.assert_close(found.mean(0), mean.squeeze(-1).double(), rtol=0, atol=0.05)
    torch.testing.assert_close(found.T.cov(), covariance[0].double(), rtol=0.05, atol=0.005)
