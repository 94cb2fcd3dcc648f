# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Densities of counts against formulas in 50 digits, from tiny to huge means, counts and concentrations."""

import itertools
import math

import mpmath
import pyro.distributions as dist
import pytest
import torch
from mpmath import mpf

from pyro_radial.distributions.counts import StableNegativeBinomial, StablePoisson

MEANS = (1e-3, 1.0, 50.0, 1e4, 1e6)
DEVIATIONS = (-3.0, -0.5, 0.0, 2.0, 6.0, 100.0)


def poisson(count, mean):
    return count * mpmath.log(mean) - mean - mpmath.loggamma(count + 1)


def negative_binomial(count, mean, r):
    choose = mpmath.loggamma(count + r) - mpmath.loggamma(r) - mpmath.loggamma(count + 1)
    return choose + count * mpmath.log(mean / (r + mean)) - r * mpmath.log1p(mean / r)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("r", [None, 1e-3, 1.0, 50.0, 1e5, 1e7, 1e12])
def test_log_densities_and_gradients_are_those_of_high_precision(dtype, r):
    """Errors are those of some roundings of the mean, and of the value."""
    eps = torch.finfo(dtype).eps
    for mean, deviation in itertools.product(MEANS, DEVIATIONS):
        spread = (mean + (0.0 if r is None else mean**2 / r)) ** 0.5
        count = torch.tensor(max(0.0, round(mean + deviation * spread)), dtype=dtype)
        if r is None:
            parameter = torch.tensor(mean, dtype=dtype).requires_grad_()
            log_prob = StablePoisson(parameter).log_prob(count)
        else:
            concentration = torch.tensor(r, dtype=dtype)
            parameter = torch.tensor(math.log(mean / r), dtype=dtype).requires_grad_()
            log_prob = StableNegativeBinomial(concentration, logits=parameter).log_prob(count)
        (gradient,) = torch.autograd.grad(log_prob, parameter)
        with mpmath.workdps(50):
            y, at = mpf(count.item()), mpf(parameter.item())
            if r is None:
                expected, slope, rounding = poisson(y, at), y / at - 1, mpf(1)
                sensitivity = slope * at
            else:
                r_used = mpf(concentration.item())
                exact_mean = r_used * mpmath.exp(at)
                expected = negative_binomial(y, exact_mean, r_used)
                slope = sensitivity = (y - exact_mean) / (1 + exact_mean / r_used)
                rounding = exact_mean / (1 + exact_mean / r_used)
            where = f"mean {mean:g}, count {count:g}"
            assert abs(log_prob.item() - expected) < 40 * eps * (1 + abs(expected) + abs(sensitivity)), where
            assert abs(gradient.item() - slope) < 20 * eps * (rounding + abs(slope)), where


def test_shapes_are_those_of_pyro_and_impossible_counts_are_refused():
    counts, numbers = torch.tensor([[0], [3], [40]]), torch.tensor([0.5, 2.0])
    for ours, pyros in (
        (StablePoisson(numbers), dist.Poisson(numbers)),
        (StableNegativeBinomial(3.0, logits=numbers), dist.NegativeBinomial(3.0, logits=numbers)),
    ):
        expected = pyros.log_prob(counts)
        torch.testing.assert_close(ours.log_prob(counts), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.expand([3, 2]).log_prob(counts), expected, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="within the support"):
            ours.log_prob(-counts)


def test_a_mean_of_zero_has_a_gradient():
    rate = torch.zeros((), requires_grad=True)
    log_prob = StablePoisson(rate).log_prob(torch.tensor(0.0))
    log_prob.backward()
    assert (log_prob.item(), rate.grad.item()) == (0.0, -1.0)
