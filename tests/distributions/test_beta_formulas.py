# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import mpmath
import pytest
import torch
from torch.distributions import Beta

from pyro_radial.distributions.beta_formulas import (
    complement_slope,
    log_rise,
    log_rise_curvature,
    log_rise_slope,
    nodes_and_weights,
)

BETAS = [0.5, 1.0, 2.0, 4.5, 49.5, 499.5]


def exact_slope(alpha, beta, y):
    """g by adaptive quadrature of high precision, on the side where the integrand has one sign."""
    with mpmath.workdps(25):
        a, b, y = (mpmath.mpf(x) for x in (alpha, beta, y))
        mean_log = mpmath.digamma(a) - mpmath.digamma(a + b)
        stddev = mpmath.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))
        steps = [stddev * k for k in (0, 0.5, 1, 2, 3, 5, 8, 12, 20, 40)]

        def integrand(u):
            log_ratio = (b - 1) * mpmath.log(u / y) + (a - 1) * mpmath.log((1 - u) / (1 - y))
            return (mpmath.log(1 - u) - mean_log) * mpmath.exp(log_ratio)

        if mpmath.log(1 - y) > mean_log:
            edges = sorted({mpmath.mpf(0), *(y * mpmath.mpf(10) ** -k for k in range(3)), *(y - s for s in steps)})
            value = mpmath.quad(integrand, [u for u in edges if 0 <= u <= y])
        else:
            edges = sorted({mpmath.mpf(1), *(y + s for s in steps)})
            value = -mpmath.quad(integrand, [u for u in edges if y <= u <= 1])
        return float(value / (y * (1 - y)))


@pytest.mark.parametrize("beta", [*BETAS, 5e4])
def test_the_scalars_are_those_of_high_precision(beta):
    alphas = [beta, beta + 1e-3, beta + 1.0, 3.0 * beta, beta + 1e4, beta + 1e6]
    with mpmath.workdps(40):
        exact = [
            (
                mpmath.loggamma(mpmath.mpf(a) + beta) - mpmath.loggamma(a),
                mpmath.digamma(mpmath.mpf(a) + beta) - mpmath.digamma(a),
                mpmath.psi(1, a) - mpmath.psi(1, mpmath.mpf(a) + beta),
            )
            for a in alphas
        ]
    for formula, column in zip((log_rise, log_rise_slope, log_rise_curvature), zip(*exact, strict=True), strict=True):
        value = formula(torch.tensor(alphas, dtype=torch.double), beta)
        expected = torch.tensor([float(number) for number in column], dtype=torch.double)
        torch.testing.assert_close(value, expected, rtol=2e-14, atol=2e-15)


@pytest.mark.parametrize("beta", BETAS)
def test_each_scalar_is_the_derivative_of_the_one_before(beta):
    alpha = (beta + torch.tensor([0.0, 1.0, 300.0], dtype=torch.double)).requires_grad_()
    (slope,) = torch.autograd.grad(log_rise(alpha, beta).sum(), alpha)
    torch.testing.assert_close(slope, log_rise_slope(alpha, beta).detach(), rtol=1e-12, atol=0)
    (curvature,) = torch.autograd.grad(log_rise_slope(alpha, beta).sum(), alpha)
    torch.testing.assert_close(-curvature, log_rise_curvature(alpha, beta).detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("beta", [0.5, 2.0, 4.5, 499.5])
def test_the_implicit_gradient_is_the_integral_it_stands_for(beta):
    for alpha in (beta, 3.0 * beta, beta + 1e6):
        mean = beta / (alpha + beta)
        stddev = (mean * (1.0 - mean) / (alpha + beta + 1.0)) ** 0.5
        draws = [y for z in (-5.0, -0.01, 1.0, 8.0) if 0.0 < (y := mean + z * stddev) < 1.0]
        draws.append(0.3 * mean)
        y = torch.tensor(draws, dtype=torch.double)
        exact = torch.tensor([exact_slope(alpha, beta, u) for u in draws], dtype=torch.double)
        torch.testing.assert_close(complement_slope(torch.full_like(y, alpha), y, beta), exact, rtol=1e-9, atol=0)


def test_torchs_gradient_is_near_it():
    alpha = torch.full((500,), 60.0, dtype=torch.double, requires_grad=True)
    draw = Beta(torch.full_like(alpha, 2.0), alpha).rsample()
    (theirs,) = torch.autograd.grad(draw.sum(), alpha)
    y = draw.detach()
    ours = -y * (1.0 - y) * complement_slope(alpha.detach(), y, 2.0)
    torch.testing.assert_close(ours, theirs, rtol=3e-3, atol=0)


def test_it_is_the_same_by_chunks_and_finite_at_the_ends():
    y = torch.tensor([1e-154, 1e-30, 0.5, 1.0 - 2e-16], dtype=torch.double).repeat(400)
    for beta in (0.5, 2.0, 300.0):
        alpha = torch.full_like(y, beta + 1.0)
        slope = complement_slope(alpha, y, beta)
        with torch.no_grad():
            torch.testing.assert_close(complement_slope(alpha, y, beta), slope)
        assert bool(slope.isfinite().all())


@pytest.mark.parametrize("count", [1, 10])
def test_the_nodes_integrate_polynomials(count):
    nodes, weights = nodes_and_weights(count, torch.zeros((), dtype=torch.double))
    for power in range(2 * count):
        assert float((weights * nodes**power).sum()) == pytest.approx(1.0 / (power + 1), abs=1e-14)
