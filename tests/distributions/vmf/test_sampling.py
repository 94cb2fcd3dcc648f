# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
from itertools import pairwise

import numpy as np
import pyro
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from torch.nn.functional import normalize

from pyro_radial.distributions.vmf import sampling
from pyro_radial.distributions.vmf.bessel import uniform_variables
from pyro_radial.distributions.vmf.functions import cosine_variance, log_mean_exp_cosine, mean_cosine, mean_cosine_gap
from pyro_radial.distributions.vmf.sampling import (
    implicit_slope,
    sample_direction,
    sample_one_minus_cosine,
    sample_uniform_direction,
)

NUM_SAMPLES = 20_000
# Dimension and concentration from flat to sharp, where other samplers fail.
PAIRS = [
    *((2, 1e-3), (2, 10.0), (2, 1e4), (2, 1e6), (3, 1e4), (3, 1e6), (10, 1e5), (50, 50.0), (50, 1e4), (500, 10.0)),
    *((500, 500.0), (500, 5e4), (500, 1e6), (4608, 4608.0), (4608, 1e6), (10**5, 1.0), (10**5, 1e4), (10**5, 1e5)),
    (10**5, 1e6),
]


def filled(value, count=NUM_SAMPLES, dtype=torch.double):
    return torch.full((count,), value, dtype=dtype)


def standard_errors(draws, expected):
    """How many standard errors the mean of the draws is from what is expected."""
    return float((draws.mean() - expected).abs() / (draws.std() / len(draws) ** 0.5))


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.0), (3, 0.0), *PAIRS])
def test_mean_and_variance_of_the_cosine_are_exact_at_any_concentration(dim, kappa, dtype):
    gap = sample_one_minus_cosine(filled(kappa, dtype=dtype), dim)
    one = torch.tensor(kappa, dtype=torch.double)
    mean = 1.0 - mean_cosine(one, dim) if kappa < 1.0 else mean_cosine_gap(one, dim) / one
    assert standard_errors(gap, mean) < 4
    assert standard_errors((gap - mean).square(), cosine_variance(one, dim)) < 4
    assert bool(((gap > 0) & (gap < 2)).all())


@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.3), (2, 8.0), (3, 4.0), (4, 2.0), (5, 30.0), (50, 60.0)])
def test_the_cosine_has_its_distribution(dim, kappa):
    gap = sample_one_minus_cosine(filled(kappa, 20_000), dim).numpy()

    # In the angle the density has no pole in two dimensions.
    def density(angle):
        return math.sin(angle) ** (dim - 2) * math.exp(-2.0 * kappa * math.sin(0.5 * angle) ** 2)

    edges = np.linspace(0.0, math.pi, 400)
    mass = np.cumsum([0.0] + [quad(density, a, b)[0] for a, b in pairwise(edges)])
    share = np.interp(np.arccos(1.0 - gap), edges, mass / mass[-1])
    assert stats.kstest(share, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("dim", "kappa"), [(2, 1e6), (2, 1.0), (10, 1e5), (50, 50.0), (500, 5e4), (10**5, 1e5)])
def test_proposals_are_accepted_as_often_as_the_closed_form_says(dim, kappa):
    one = torch.tensor(kappa, dtype=torch.double)
    v = uniform_variables(one, 0.5 * (dim - 1))
    _, accepted = sampling._propose(v.a0.expand(NUM_SAMPLES), v.one_minus_a0.expand(NUM_SAMPLES), dim, 1)
    rate = float((log_mean_exp_cosine(one, dim) - v.lam * (2.0 * v.q - v.q.log1p())).exp())
    assert abs(float(accepted.double().mean()) - rate) < 4 * (rate * (1 - rate) / NUM_SAMPLES) ** 0.5
    refused = 1.0 - rate
    assert refused < sampling.MOST_REFUSED
    assert refused**sampling.NUM_PROPOSALS < 1e-11


def test_the_bound_on_refused_rows_is_practically_never_exceeded():
    share = sampling.MOST_REFUSED**sampling.FIRST_PROPOSALS
    for count in (1, 5, 20, 100, 800, 10**4, 10**6):
        assert stats.binom.sf(sampling._most_refused(count), count, share) < 1e-12


def integral_slope(kappa, gap, dim):
    """g by quadrature, from the side of the draw where the integrand has one sign."""
    mean = float(mean_cosine(torch.tensor(kappa, dtype=torch.double), dim))
    mirrored = 1.0 - gap < mean
    edge, sign = (2.0 - gap, -1.0) if mirrored else (gap, 1.0)
    # In the logarithm of the distance to the pole, over the draw's own: all of the mass is within so much of it.
    nodes, weights = np.polynomial.legendre.leggauss(20)
    panels = np.append(0.0, np.geomspace(1e-7, 40.0 / dim**0.5 + 90.0 / dim, 300))[:, None]
    half = 0.5 * np.diff(panels, axis=0)
    x = panels[:-1] + half * (nodes + 1.0)
    e = edge * np.exp(-x)
    log_ratio = 0.5 * (dim - 3) * (-x + np.log1p((edge - e) / (2.0 - edge))) + sign * kappa * (edge - e)
    value = (sign * (1.0 - e) - mean) * np.exp(log_ratio) * e
    return sign * float((value * weights * half).sum()) / (gap * (2.0 - gap))


@pytest.mark.parametrize("dim", [10, 17, 24, 25, 26, 41, 64, 150, 500, 4608])
def test_the_implicit_gradient_is_the_integral_it_stands_for(dim):
    for kappa in (0.01, 0.3 * dim, 2.0 * dim, 1e4):
        one = torch.tensor(kappa, dtype=torch.double)
        spread, mean_gap = cosine_variance(one, dim).sqrt(), mean_cosine_gap(one, dim) / one
        gaps = torch.stack([mean_gap - z * spread for z in (-6.0, -2.0, -0.1, 1.0, 4.0)])
        gaps = gaps[(gaps > 0.0) & (gaps < 2.0)]
        exact = torch.tensor([integral_slope(kappa, float(gap), dim) for gap in gaps], dtype=torch.double)
        torch.testing.assert_close(implicit_slope(one.expand(gaps.shape), gaps, dim), exact, rtol=1e-11, atol=0)


def test_far_in_the_tails_and_at_the_ends_the_gradient_keeps_to_its_range():
    for dim in (2, 3, 10, 30, 500, 10**5):
        for kappa in (0.0, 1e-30, 1e-6, 1.0, 1e3, 1e6):
            gaps = torch.tensor([1e-154, 1e-12, 1.0, 2.0 - 1e-12, 2.0 - 4.4e-16], dtype=torch.double)
            one = filled(kappa, len(gaps)).requires_grad_()
            slope = implicit_slope(one, gaps, dim)
            mean, share = mean_cosine(one, dim), slope * (dim - 1)
            assert bool(((share > 0.999 * (1.0 - mean) - 1e-15) & (share < 1.001 * (1.0 + mean))).all())
            (second,) = torch.autograd.grad(slope.sum(), one)
            assert bool(second.isfinite().all())


@pytest.mark.parametrize(("dim", "kappa"), [(2, 0.0), (2, 3.0), (3, 0.7), (10, 10.0), (50, 20.0), (500, 500.0)])
def test_the_second_derivative_of_the_mean_cosine_is_unbiased(dim, kappa):
    one = filled(kappa).requires_grad_()
    (first,) = torch.autograd.grad(-sample_one_minus_cosine(one, dim).sum(), one, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), one)
    at = torch.tensor(kappa, dtype=torch.double, requires_grad=True)
    (exact,) = torch.autograd.grad(cosine_variance(at, dim), at)
    assert standard_errors(second, exact) < 4


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("dim", [2, 3, 500])
def test_a_draw_has_length_one_and_its_cosine_wherever_loc_points(dim, dtype):
    tolerance = 5e-7 if dtype == torch.float else 4e-15
    distance = torch.tensor([0.0, 1e-9, 1e-6, 1e-3, 0.1, 1.0], dtype=torch.double).repeat(2)
    loc = torch.randn(12, dim, dtype=torch.double) * distance.unsqueeze(-1)
    loc[:, 0] = torch.tensor([1.0] * 6 + [-1.0] * 6)
    loc = normalize(loc, dim=-1).to(dtype)
    loc[6, 1:] = loc[0, 1:] = 0.0
    gap = (2.0 * torch.rand(200, 12, dtype=torch.double)).square().clamp(1e-12, 2.0 - 1e-12)
    value = sample_direction(loc.expand(200, 12, dim), gap).double()
    assert float((value.norm(dim=-1) - 1.0).abs().max()) < tolerance
    assert float(((value * loc.double()).sum(-1) - (1.0 - gap)).abs().max()) < tolerance


def test_in_a_hundred_thousand_dimensions_float32_keeps_the_length():
    loc = normalize(torch.randn(8, 10**5), dim=-1)
    value = sample_direction(loc, sample_one_minus_cosine(filled(1e5, 8), 10**5)).double()
    assert float((value.norm(dim=-1) - 1.0).abs().max()) < 5e-7
    assert float((sample_uniform_direction((8, 10**5), loc).double().norm(dim=-1) - 1.0).abs().max()) < 5e-7


@pytest.mark.parametrize("dim", [2, 3, 6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradients_of_a_direction_match_differences(dim, sign):
    raw = torch.randn(4, dim, dtype=torch.double)
    raw[:, 0] = sign * raw[:, 0].abs()
    gap = (0.1 + 1.8 * torch.rand(4, dtype=torch.double)).requires_grad_()

    # The formulas of the gradient hold for unit vectors.
    def draw(raw, gap):
        pyro.set_rng_seed(1)
        return sample_direction(normalize(raw, dim=-1), gap)

    assert torch.autograd.gradcheck(draw, (raw.requires_grad_(), gap))
    assert torch.autograd.gradgradcheck(draw, (raw, gap))


def test_a_row_of_one_free_element_that_is_exactly_zero_still_has_a_direction(monkeypatch):
    monkeypatch.setattr(torch, "randn", torch.zeros)
    value = sample_direction(torch.tensor([[0.6, 0.8]]), torch.tensor([0.4], dtype=torch.double))
    assert float(value.norm()) == pytest.approx(1.0, abs=1e-6)
    assert float(sample_uniform_direction((2,), value).norm()) == pytest.approx(1.0, abs=1e-6)


def test_nothing_is_computed_for_a_gradient_that_nobody_needs(monkeypatch):
    calls = []
    original = sampling.implicit_slope
    monkeypatch.setattr(sampling, "implicit_slope", lambda *args: calls.append(1) or original(*args))
    loc = normalize(torch.randn(3, 5), dim=-1).requires_grad_()
    kappa = torch.ones(3)
    sample_direction(loc, sample_one_minus_cosine(kappa, 5)).sum().backward()
    sample_direction(loc, sample_one_minus_cosine(kappa.requires_grad_(), 5))
    assert not calls
    sample_direction(loc, sample_one_minus_cosine(kappa, 5)).sum().backward()
    assert len(calls) == 1
