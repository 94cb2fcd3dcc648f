# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pyro
import pytest
import torch
from scipy.special import wofz

from pyro_radial.distributions import log_distance
from pyro_radial.distributions.log_distance import (
    mean_log_distance_of_normal,
    mean_log_distance_of_radial,
    num_directions,
)
from pyro_radial.distributions.mean_log_square import mean_log_square

# Every pair of these is a point (b, c); the signs of b come on top.
SIZES = [0.0, 1e-8, 1e-3, 0.1, 0.5, 1.0, 2.0, 3.3, 5.0, 8.0, 20.0, 100.0, 1e4]
PAIRS = np.array([(b, c) for b in SIZES for c in SIZES])
MEANS = [mean_log_distance_of_radial, mean_log_distance_of_normal]


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


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_a_bad_number_of_directions_names_the_setting(value):
    with pytest.raises(ValueError, match="radial_kl_directions"):
        pyro.settings.set(radial_kl_directions=value)


@pytest.mark.parametrize("value", [0.5, True, "0"])
def test_a_bad_seed_names_the_setting(value):
    with pytest.raises(ValueError, match="radial_kl_seed"):
        pyro.settings.set(radial_kl_seed=value)


def test_small_events_take_more_directions_and_large_ones_as_many_as_set():
    assert [num_directions(elements) for elements in (2, 10, 999)] == [500, 100, log_distance.NUM_DIRECTIONS]
    with pyro.settings.context(radial_kl_directions=7):
        assert [num_directions(elements) for elements in (2, 10, 10**6)] == [500, 100, 7]


@pytest.mark.parametrize("mean", MEANS)
def test_the_number_of_directions_is_the_number_drawn(mean, monkeypatch):
    drawn, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda shape, **kwargs: drawn.append(tuple(shape)) or randn(shape, **kwargs))
    ratio, shift = torch.rand(3, 600) + 0.1, torch.ones(3, 600)
    with pyro.settings.context(radial_kl_directions=5):
        assert mean(ratio, shift).shape == (3,)
    assert drawn == [(3, 5, 600)]


@pytest.mark.parametrize("mean", MEANS)
def test_a_fixed_seed_gives_one_value_and_leaves_the_global_generator_alone(mean):
    ratio, shift = torch.rand(6) + 0.1, torch.randn(6)
    before = torch.get_rng_state()
    first, second = mean(ratio, shift), mean(ratio, shift)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    with pyro.settings.context(radial_kl_seed=1):
        assert not torch.equal(mean(ratio, shift), first)


@pytest.mark.parametrize("mean", MEANS)
def test_without_a_seed_directions_come_from_the_global_generator(mean):
    ratio, shift = torch.rand(6) + 0.1, torch.randn(6)
    with pyro.settings.context(radial_kl_seed=None):
        pyro.set_rng_seed(3)
        first, second = mean(ratio, shift), mean(ratio, shift)
        pyro.set_rng_seed(3)
        again = mean(ratio, shift)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@pytest.mark.parametrize("mean", MEANS)
def test_rows_of_a_batch_have_directions_of_their_own(mean):
    ratio, shift = (torch.rand(6) + 0.1).repeat(3, 1), torch.randn(6).repeat(3, 1)
    assert len(set(mean(ratio, shift).tolist())) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_for_equal_ratios_and_means_every_direction_gives_the_same_exact_value(dtype):
    ratio = torch.full((3, 20_000), 2.0, dtype=dtype)
    # log(2) and the mean log of a half-normal radius; float32 sums over a direction would leave 1e-7.
    exact = math.log(2.0) - 0.5 * (np.euler_gamma + math.log(2.0))
    assert mean_log_distance_of_radial(ratio, torch.zeros_like(ratio)).tolist() == pytest.approx(3 * [exact], abs=1e-12)
