# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores estimated from draws, against distributions with known scores and against their own equations."""

import pyro
import pytest
import torch

from pyro_radial.functional.divergences.stein import SteinScore
from tests.helpers.devices import CountHostReads
from tests.helpers.functional import white

#: With a large ridge nothing is left of the kernel but the score of the normal distribution of the draws.
ESTIMATORS = {"moments": SteinScore(ridge=1e9), "stein": SteinScore()}
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS.keys())


def smooth_covariance(dim):
    x = torch.linspace(-1, 1, dim, dtype=torch.double)
    return (-2.0 * (x[:, None] - x).square()).exp() + 0.01 * torch.eye(dim, dtype=torch.double)


def normal(count, covariance):
    return torch.randn(count, len(covariance), dtype=torch.double) @ torch.linalg.cholesky(covariance).mT


def kernel_and_slope(z, draws):
    """The kernel of median width, and its gradient in the draws by autograd, summed over draws."""
    width = torch.pdist(draws).median()
    at = draws.clone().requires_grad_()
    kernel = (-0.5 * (z[:, None] - at).square().sum(-1) / width**2).exp()
    slope = torch.stack([torch.autograd.grad(row, at, retain_graph=True)[0].sum(0) for row in kernel.sum(1)])
    return kernel.detach(), slope


# Normal draws, whose score is known.


def test_moments_at_the_draws_satisfy_steins_identity_exactly():
    draws = normal(40, smooth_covariance(12)) + 3.0
    score = ESTIMATORS["moments"](draws)
    identity = score.mT @ (draws - draws.mean(0)) / 40
    torch.testing.assert_close(identity, -torch.eye(12, dtype=torch.double), atol=1e-4, rtol=0)


def test_moments_elsewhere_are_unbiased():
    covariance = smooth_covariance(6)
    at = normal(3, covariance)
    estimates = torch.stack([ESTIMATORS["moments"](normal(12, covariance) - 1.0, at - 1.0) for _ in range(300)])
    truth = -at @ torch.linalg.inv(covariance)
    standard_errors = (estimates.mean(0) - truth).abs() / (estimates.std(0) / 300**0.5)
    assert float(standard_errors.max()) < 4.0


@each_estimator
def test_scores_do_not_depend_on_units_or_mixing(estimator):
    draws, at = torch.randn(60, 4, dtype=torch.double), torch.randn(7, 4, dtype=torch.double)
    mixing = torch.randn(4, 4, dtype=torch.double) + 3.0 * torch.eye(4, dtype=torch.double)
    inverse = torch.linalg.inv(mixing)
    for place in (None, at):
        moved = estimator(draws @ mixing + 10.0, None if place is None else place @ mixing + 10.0)
        torch.testing.assert_close(moved, estimator(draws, place) @ inverse.mT, rtol=1e-4, atol=1e-4)


def test_stein_solves_its_regression():
    draws = white(50, 3)
    kernel, slope = kernel_and_slope(draws, draws)
    score, eta = SteinScore(ridge=0.02)(draws), 0.02 * 50
    base = ESTIMATORS["moments"](draws)
    torch.testing.assert_close(kernel @ score + eta * (score - base), -slope, rtol=1e-6, atol=1e-6)
    # Elsewhere the same equation holds with the kernel to the draws.
    at = torch.randn(9, 3, dtype=torch.double)
    kernel, slope = kernel_and_slope(at, draws)
    elsewhere = SteinScore(ridge=0.02)(draws, at)
    base = ESTIMATORS["moments"](draws, at)
    torch.testing.assert_close(kernel @ score + eta * (elsewhere - base), -slope, rtol=1e-6, atol=1e-6)


# What holds for all.


@each_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_have_the_dtype_of_the_draws_and_no_gradient(estimator, dtype):
    draws = torch.randn(50, 3, dtype=dtype, requires_grad=True)
    for at in (None, torch.randn(4, 3, dtype=dtype)):
        score = estimator(draws, at)
        assert score.dtype == dtype
        assert score.shape == (50 if at is None else 4, 3)
        assert not score.requires_grad
    torch.testing.assert_close(estimator(draws), estimator(draws.double()).to(dtype), rtol=1e-4, atol=1e-4)


@each_estimator
def test_draws_of_few_degrees_of_freedom_have_finite_scores_along_them(estimator):
    line = torch.randn(50, 1, dtype=torch.double)
    mostly_equal = torch.zeros(40, 2)
    mostly_equal[:9] = torch.randn(9, 2)
    assert bool(estimator(mostly_equal).isfinite().all())
    score = estimator(line * torch.ones(3, dtype=torch.double))
    assert bool(score.isfinite().all())
    # By the chain rule, the score in the line's one parameter.
    torch.testing.assert_close(score.sum(-1, keepdim=True), estimator(line), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e(torch.randn(5, 3)), "samples must be at least 6 draws of 3 values"),
        (lambda e: e(torch.ones(50, 3)), "samples must be finite and not all equal"),
        (lambda e: e(torch.full((50, 3), torch.nan)), "samples must be finite"),
    ],
)
@each_estimator
def test_bad_input_is_named(estimator, call, message):
    with pytest.raises(ValueError, match=message):
        call(estimator)


@each_estimator
def test_without_validation_no_number_is_read_on_the_host(estimator):
    draws, at = torch.randn(50, 3), torch.randn(4, 3)
    with pyro.validation_enabled(False), CountHostReads() as reads:
        estimator(draws)
        estimator(draws, at)
    assert reads.count == 0
