# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch
from scipy.special import wofz

from pyro_radial.distributions.kl_formulas.mean_log_square import (
    excess_log_square,
    mean_log_square,
    slopes_of_log_square,
    terms_for,
)

# Every pair of these is a point (b, c); the signs of b come on top.
SIZES = [0.0, 1e-8, 1e-3, 0.1, 0.5, 1.0, 2.0, 3.3, 5.0, 8.0, 20.0, 100.0, 1e4]
PAIRS = np.array([(b, c) for b in SIZES for c in SIZES])


def log_square_by_quadrature(b, c):
    """The Laplace transform of (r + b)^2 + c^2 against that of Exponential(1), by the trapezoid rule in log s."""
    log_s = np.arange(-62.0, 84.0, 0.1)
    s = np.exp(log_s)
    spread = 1.0 + 2.0 * s
    transform = np.exp(-s * (c[:, None] ** 2 + b[:, None] ** 2 / spread)) / np.sqrt(spread)
    return 0.1 * (np.exp(-s) - transform).sum(-1)


def pair_tensors(dtype=torch.double):
    return torch.tensor(PAIRS, dtype=dtype).unbind(-1)


def test_the_mean_log_square_is_that_of_quadrature_at_every_scale():
    expected = log_square_by_quadrature(*PAIRS.T)
    for sign in (1.0, -1.0):
        b, c = pair_tensors()
        value = mean_log_square(sign * b, c).numpy()
        # 1e-13 from the expansion, as much again from rounding in the sum of 1460 terms.
        np.testing.assert_allclose(value, expected, rtol=1e-13, atol=3e-13)


def test_at_the_center_it_is_the_mean_log_of_chi_squared():
    zero = torch.zeros((), dtype=torch.double)
    assert float(mean_log_square(zero, zero)) == pytest.approx(-np.euler_gamma - math.log(2.0), abs=1e-13)


def test_its_derivatives_are_the_faddeeva_function():
    b, c = (tensor.requires_grad_() for tensor in pair_tensors())
    by_b, by_c = torch.autograd.grad(mean_log_square(b, c).sum(), (b, c))
    slope = -1j * math.sqrt(math.pi / 2.0) * wofz((PAIRS[:, 0] + 1j * PAIRS[:, 1]) / math.sqrt(2.0))
    # A derivative of an expansion with an error below 1e-13 loses a digit or two.
    np.testing.assert_allclose(by_b.numpy(), 2.0 * slope.real, rtol=1e-11, atol=3e-12)
    np.testing.assert_allclose(by_c.numpy(), -2.0 * slope.imag, rtol=1e-11, atol=3e-12)


def test_first_and_second_derivatives_match_differences():
    b = torch.tensor([-3.0, -0.2, 0.0, 1e-3, 4.0, 50.0], dtype=torch.double, requires_grad=True)
    c = torch.tensor([0.5, 0.1, 1.0, 2.0, 0.3, 7.0], dtype=torch.double, requires_grad=True)
    torch.autograd.gradcheck(mean_log_square, (b, c))
    torch.autograd.gradgradcheck(mean_log_square, (b, c))


def test_in_float32_it_keeps_float32_accuracy_and_finite_gradients():
    b, c = (tensor.requires_grad_() for tensor in pair_tensors(torch.float32))
    value = mean_log_square(b, c)
    assert value.dtype == torch.float32
    exact = mean_log_square(*(tensor.detach().double() for tensor in (b, c)))
    # 32 terms of size one, each rounded to 6e-8.
    torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=4e-6)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(value.sum(), (b, c)))


def test_its_arguments_broadcast():
    b, c = torch.randn(4, 1), torch.rand(3)
    torch.testing.assert_close(mean_log_square(b, c), mean_log_square(b.expand(4, 3), c.expand(4, 3)))


def test_as_many_terms_as_a_dtype_has_digits_for():
    b, c = pair_tensors()
    few = terms_for(torch.float32)
    assert few < terms_for(torch.float64)
    # Below a digit of float32, 6e-8, of a number of size one.
    torch.testing.assert_close(excess_log_square(b, c, few), excess_log_square(b, c), rtol=0, atol=5e-9)
    zero = torch.zeros((), dtype=torch.double)
    assert float(excess_log_square(zero, zero, few)) == 0.0
    for value, exact in zip(slopes_of_log_square(b, c, few), slopes_of_log_square(b, c), strict=True):
        torch.testing.assert_close(value, exact, rtol=0, atol=2e-8)


def test_its_slopes_are_its_derivatives_also_with_few_terms():
    b, c = (tensor.requires_grad_() for tensor in pair_tensors())
    for terms, tolerance in ((terms_for(torch.float64), 1e-11), (terms_for(torch.float32), 1e-7)):
        by_b, by_c = torch.autograd.grad(excess_log_square(b, c, terms).sum(), (b, c))
        slopes = slopes_of_log_square(b.detach(), c.detach(), terms)
        torch.testing.assert_close((by_b, by_c), slopes, rtol=0, atol=tolerance)
