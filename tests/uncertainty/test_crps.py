# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import crps_from_draws, crps_normal

DOUBLE = {"dtype": torch.float64}


def by_quadrature(loc, scale, y):
    """The integral of the squared distance of distribution functions, on both sides of the target."""

    def distribution(z):
        return norm.cdf(z, loc, scale).mean()

    points = sorted({*loc, y})
    low, high = min(points) - 12 * max(scale), max(points) + 12 * max(scale)
    below = quad(lambda z: distribution(z) ** 2, low, y, epsabs=1e-11, limit=500)[0]
    above = quad(lambda z: (1 - distribution(z)) ** 2, y, high, epsabs=1e-11, limit=500)[0]
    return below + above


def test_one_normal_is_in_closed_form():
    """Gneiting and Raftery's equation 5: sigma (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))."""
    loc, scale, y = torch.randn(20, **DOUBLE), torch.rand(20, **DOUBLE) + 0.1, 3 * torch.randn(20, **DOUBLE)
    z = ((y - loc) / scale).numpy()
    expected = scale.numpy() * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert crps_normal(loc[None], scale, y).item() == pytest.approx(expected.mean(), rel=1e-12)


@pytest.mark.parametrize("y", [-4.0, 0.3, 2.9])
def test_a_mixture_of_normals_agrees_with_quadrature(y):
    loc, scale = np.array([-1.0, 0.5, 3.0]), np.array([0.3, 1.0, 0.05])
    value = crps_normal(torch.tensor(loc)[:, None], torch.tensor(scale)[:, None], torch.tensor([y], **DOUBLE))
    assert value.item() == pytest.approx(by_quadrature(loc, scale, y), abs=1e-9)


def test_draws_worked_by_hand():
    """Draws 0, 1 and 4 and a target of 2: gaps 2, 1, 2; pairs 1, 4, 3 apart."""
    draws = torch.tensor([[4.0], [0.0], [1.0]])
    assert crps_from_draws(draws, torch.tensor([2.0])).item() == pytest.approx(5 / 3 - (8 / 3) / 2)
    assert crps_from_draws(draws + 1e4, torch.tensor([2.0 + 1e4])).item() == pytest.approx(1 / 3, rel=1e-6)


def test_draws_are_scored_as_all_their_pairs():
    draws, y = torch.randn(7, 5, 2, **DOUBLE), torch.randn(5, 2, **DOUBLE)
    pairs = sum((draws[i] - draws[j]).abs() for i, j in itertools.permutations(range(7), 2)) / 42
    expected = ((draws - y).abs().mean(0) - pairs / 2).mean()
    torch.testing.assert_close(crps_from_draws(draws, y), expected)


@pytest.mark.parametrize("number", [2, 3, 10])
def test_few_draws_are_scored_without_bias(number):
    """Each of many points has draws of its own; the mean is that of the closed form, however few the draws."""
    points = 200_000
    y = torch.full((points,), 0.7, **DOUBLE)
    draws = 2 * torch.randn(number, points, **DOUBLE)
    expected = crps_normal(torch.zeros(1, 1, **DOUBLE), torch.full((1, 1), 2.0, **DOUBLE), y[:1]).item()
    # The score of one point varies with its draws by about their standard deviation, less the more draws it has.
    assert crps_from_draws(draws, y).item() == pytest.approx(expected, abs=4 * 2 / math.sqrt(number * points))


def test_targets_of_a_prediction_are_scored_as_its_mixture():
    functions, points = 400, 500
    samples = torch.randn(functions, points, 1, **DOUBLE)
    noise = torch.rand(functions, 1, **DOUBLE) + 0.5
    prediction = Prediction(samples, likelihoods.Gaussian(), {"scale": noise})
    y = torch.randn(points, **DOUBLE)
    exact = crps_normal(samples, noise[..., None], y).item()
    # The error of a point is of the order of 1 / sqrt(functions), and points are nearly independent.
    estimate = crps_from_draws(prediction.sample_targets(), y).item()
    assert estimate == pytest.approx(exact, abs=4 / math.sqrt(functions * points) + 2 / functions)


def test_scores_have_gradients():
    loc = torch.zeros(3, 4, requires_grad=True, **DOUBLE)
    scale = torch.ones(3, 1, requires_grad=True, **DOUBLE)
    shift = torch.tensor([[-1.0], [0.0], [2.0]], **DOUBLE)
    y = torch.tensor([0.5, 1.0, -1.0, 2.0], **DOUBLE)
    assert torch.autograd.gradcheck(lambda a, b: crps_normal(a + shift, b, y), (loc, scale))
    assert torch.autograd.gradcheck(lambda a: crps_from_draws(a + shift, y), (loc,))


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda: crps_from_draws(torch.zeros(1, 3), torch.zeros(3)), r"draws must have shape \[S, N, ...\] with S > 1"),
        (lambda: crps_from_draws(torch.zeros(3), torch.zeros(3)), "draws must have shape"),
        (
            lambda: crps_from_draws(torch.zeros(4, 3, 2), torch.zeros(3)),
            r"targets must have shape \[3, 2\] to fit",
        ),
        (lambda: crps_from_draws(torch.zeros(4, 3), torch.zeros(4)), r"targets must have shape \[3\].*got \[4\]"),
        (lambda: crps_from_draws(torch.zeros(4, 0), torch.zeros(0)), "targets must have shape"),
        (lambda: crps_from_draws(torch.zeros(4, 3).long(), torch.zeros(3)), "draws must be floating-point"),
        (lambda: crps_from_draws(torch.zeros(4, 3), torch.full((3,), math.nan)), "targets must be finite"),
        (lambda: crps_from_draws(torch.full((4, 3), math.inf), torch.zeros(3)), "draws must be finite"),
        (lambda: crps_normal(torch.zeros(3), torch.ones(3), torch.zeros(3)), r"loc must have shape \[S, N, ...\]"),
        (lambda: crps_normal(torch.zeros(2, 3), torch.zeros(()), torch.zeros(3)), "scale must be positive and finite"),
        (lambda: crps_normal(torch.zeros(2, 3), torch.ones(2), torch.zeros(3)), "scale must broadcast to the shape"),
        (lambda: crps_normal(torch.zeros(2, 3), torch.ones(()), torch.zeros(2)), "targets must have shape"),
    ],
)
def test_bad_arguments_are_named(score, message):
    with pytest.raises(ValueError, match=f"crps_(from_draws|normal): {message}"):
        score()
