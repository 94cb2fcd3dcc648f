# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pyro
import pytest
import torch

from pyro_radial.distributions.kl_formulas import shared
from pyro_radial.distributions.kl_formulas.shared import (
    combine,
    excess_log_square,
    excess_log_square_derivatives,
    log_distance,
    log_distance_derivatives,
    log_of_square,
    num_directions,
    project,
    shrinkage,
    terms_for,
)
from tests.helpers.distributions import FAMILIES, kl_of, parameters

# --- directions


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_bad_number_of_directions_names_the_setting(value):
    with pytest.raises(ValueError, match="radial_kl_directions"):
        pyro.settings.set(radial_kl_directions=value)


def test_small_events_take_more_directions_and_large_ones_as_many_as_set():
    assert [num_directions(elements) for elements in (2, 10, 999)] == [500, 100, shared.NUM_DIRECTIONS]
    with pyro.settings.context(radial_kl_directions=7):
        assert [num_directions(elements) for elements in (2, 10, 10**6)] == [500, 100, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_directions_is_the_number_drawn(family, monkeypatch):
    drawn, randn, arguments = [], torch.randn, parameters(3, 600)
    monkeypatch.setattr(torch, "randn", lambda shape, **kwargs: drawn.append(tuple(shape)) or randn(shape, **kwargs))
    with pyro.settings.context(radial_kl_directions=5):
        assert kl_of(family)(*arguments).shape == (3,)
    assert drawn == [(3, 5, 600)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fixed_seed_gives_one_value_and_leaves_the_global_generator_alone(family):
    kl, arguments = kl_of(family), parameters(6)
    before = torch.get_rng_state()
    first, second = kl(*arguments), kl(*arguments)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    with pyro.settings.context(radial_kl_seed=1):
        assert not torch.equal(kl(*arguments), first)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_seed_directions_come_from_the_global_generator(family):
    kl, arguments = kl_of(family), parameters(6)
    with pyro.settings.context(radial_kl_seed=None):
        pyro.set_rng_seed(3)
        first, second = kl(*arguments), kl(*arguments)
        pyro.set_rng_seed(3)
        again = kl(*arguments)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 30])
def test_projection_and_combination_are_those_of_matrices(count):
    noise, vector, weights = torch.randn(4, 3, count, 7), torch.randn(4, 3, 7), torch.randn(count, 4, 3, 1)
    projected = project(noise, vector)
    torch.testing.assert_close(projected, torch.einsum("abnd,abd->nab", noise, vector).double(), check_dtype=False)
    assert projected.dtype == torch.float64
    torch.testing.assert_close(combine(weights, noise), torch.einsum("nab,abnd->abd", weights.squeeze(-1), noise))


# --- the mean log-distance from a point to a normal variable on a line

A = torch.tensor([0.01, 0.4, 1.0, 1.7, 30.0], dtype=torch.double)
C = torch.tensor([1e-3, 0.2, 1.0, 8.0, 1e4], dtype=torch.double)


def lines():
    """Every a with every c, and b on both sides, of up to nearly the root of a c."""
    a, c, part = torch.meshgrid(A, C, torch.tensor([-0.99, -0.3, 0.0, 0.6, 0.99], dtype=torch.double), indexing="ij")
    return a.contiguous(), part * (a * c).sqrt(), c.contiguous()


def by_quadrature(a, b, c):
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    r = torch.tensor(nodes)
    logs = (a[..., None] * r.square() + 2.0 * b[..., None] * r + c[..., None]).log()
    return 0.5 * logs @ torch.tensor(weights / weights.sum())


def test_it_is_that_of_quadrature_away_from_the_center():
    a, b, c = lines()
    at_center = -0.5 * (np.euler_gamma + math.log(2.0))
    away = c > 7.0 * a
    value, expected = log_distance(a, b, c) + at_center, by_quadrature(a, b, c)
    torch.testing.assert_close(value[away & (b == 0)], expected[away & (b == 0)], rtol=0, atol=1e-4)


def test_its_slopes_are_its_derivatives():
    a, b, c = (tensor.requires_grad_() for tensor in lines())
    expected = torch.autograd.grad(log_distance(a, b, c).sum(), (a, b, c))
    torch.testing.assert_close(log_distance_derivatives(a.detach(), b.detach(), c.detach()), expected)


def test_at_the_tip_of_the_cone_the_slope_is_that_along_the_line():
    one, zero = torch.ones(1, dtype=torch.double), torch.zeros(1, dtype=torch.double)
    assert [slope.tolist() for slope in log_distance_derivatives(one, zero, zero)] == [[0.5], [0.0], [0.0]]


@pytest.mark.parametrize("above", [-0.999999, -0.5, -1e-9, 0.0, 1e-12, 3.0])
def test_the_log_of_a_square_keeps_its_digits_near_one(above):
    root = torch.tensor(1.0 + above, dtype=torch.double).sqrt()
    value = float(log_of_square(root, torch.tensor(above, dtype=torch.double)))
    assert value == pytest.approx(math.log1p(above), rel=1e-12 if above > -0.9 else 1e-9)


def test_a_parabola_is_kept_where_a_square_hardly_varies():
    assert shrinkage(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([1.0, 0.2])


# --- the mean log of a square

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


def mean_log_square(offset, width):
    return excess_log_square(offset, width) - np.euler_gamma - math.log(2.0)


def test_the_mean_log_square_is_that_of_quadrature_at_every_scale():
    expected = log_square_by_quadrature(*PAIRS.T)
    for sign in (1.0, -1.0):
        b, c = pair_tensors()
        value = mean_log_square(sign * b, c).numpy()
        # 1e-13 from the expansion, as much again from rounding in the sum of 1460 terms.
        np.testing.assert_allclose(value, expected, rtol=1e-13, atol=3e-13)


def test_in_float32_it_keeps_float32_accuracy_and_finite_slopes():
    b, c = pair_tensors(torch.float32)
    value = mean_log_square(b, c)
    assert value.dtype == torch.float32
    # 32 terms of size one, each rounded to 6e-8.
    torch.testing.assert_close(value.double(), mean_log_square(b.double(), c.double()), rtol=1e-6, atol=4e-6)
    assert all(bool(torch.isfinite(slope).all()) for slope in excess_log_square_derivatives(b, c))


def test_as_many_terms_as_a_dtype_has_digits_for():
    b, c = pair_tensors()
    few = terms_for(torch.float32)
    assert few < terms_for(torch.float64)
    # Below a digit of float32, 6e-8, of a number of size one.
    torch.testing.assert_close(excess_log_square(b, c, few), excess_log_square(b, c), rtol=0, atol=5e-9)
    zero = torch.zeros((), dtype=torch.double)
    assert float(excess_log_square(zero, zero, few)) == 0.0
    for value, exact in zip(excess_log_square_derivatives(b, c, few), excess_log_square_derivatives(b, c), strict=True):
        torch.testing.assert_close(value, exact, rtol=0, atol=2e-8)
