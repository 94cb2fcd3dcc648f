# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.kl_formulas import directions as module
from pyro_radial.distributions.kl_formulas.directions import combine, directions, num_directions, project
from pyro_radial.distributions.kl_formulas.radial_to_radial import radial_to_radial


def from_radial(ratio, shift):
    return kl_divergence(RadialNormal(shift, ratio), RadialNormal(torch.zeros_like(shift), torch.ones_like(ratio)))


def from_normal(ratio, shift):
    p = RadialNormal(torch.zeros_like(shift), torch.ones_like(ratio))
    return kl_divergence(dist.Normal(shift, ratio).to_event(1), p)


KLS = [from_radial, from_normal]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_a_bad_number_of_directions_names_the_setting(value):
    with pytest.raises(ValueError, match="radial_kl_directions"):
        pyro.settings.set(radial_kl_directions=value)


@pytest.mark.parametrize("value", [0.5, True, "0"])
def test_a_bad_seed_names_the_setting(value):
    with pytest.raises(ValueError, match="radial_kl_seed"):
        pyro.settings.set(radial_kl_seed=value)


def test_small_events_take_more_directions_and_large_ones_as_many_as_set():
    assert [num_directions(elements) for elements in (2, 10, 999)] == [500, 100, module.NUM_DIRECTIONS]
    with pyro.settings.context(radial_kl_directions=7):
        assert [num_directions(elements) for elements in (2, 10, 10**6)] == [500, 100, 7]


@pytest.mark.parametrize("kl", KLS)
def test_the_number_of_directions_is_the_number_drawn(kl, monkeypatch):
    drawn, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda shape, **kwargs: drawn.append(tuple(shape)) or randn(shape, **kwargs))
    ratio, shift = torch.rand(3, 600) + 0.1, torch.ones(3, 600)
    with pyro.settings.context(radial_kl_directions=5):
        assert kl(ratio, shift).shape == (3,)
    assert drawn == [(3, 5, 600)]


@pytest.mark.parametrize("kl", KLS)
def test_a_fixed_seed_gives_one_value_and_leaves_the_global_generator_alone(kl):
    ratio, shift = torch.rand(6) + 0.1, torch.randn(6)
    before = torch.get_rng_state()
    first, second = kl(ratio, shift), kl(ratio, shift)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    with pyro.settings.context(radial_kl_seed=1):
        assert not torch.equal(kl(ratio, shift), first)


@pytest.mark.parametrize("kl", KLS)
def test_without_a_seed_directions_come_from_the_global_generator(kl):
    ratio, shift = torch.rand(6) + 0.1, torch.randn(6)
    with pyro.settings.context(radial_kl_seed=None):
        pyro.set_rng_seed(3)
        first, second = kl(ratio, shift), kl(ratio, shift)
        pyro.set_rng_seed(3)
        again = kl(ratio, shift)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


@pytest.mark.parametrize("kl", KLS)
def test_rows_of_a_batch_have_directions_of_their_own(kl):
    ratio, shift = (torch.rand(6) + 0.1).repeat(3, 1), torch.randn(6).repeat(3, 1)
    assert len(set(kl(ratio, shift).tolist())) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_for_equal_ratios_and_means_every_direction_gives_the_same_exact_value(dtype):
    ratio = torch.full((3, 20_000), 2.0, dtype=dtype)
    kl, *_ = radial_to_radial(ratio, torch.zeros_like(ratio), directions(ratio), False)
    # Of half-normals of scale 2 and 1; float32 sums over a direction would leave 1e-7 times 20,000.
    assert kl.tolist() == pytest.approx(3 * [1.5 - math.log(2.0)], abs=1e-9)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 30])
def test_projection_and_combination_are_those_of_matrices(count):
    noise, vector, weights = torch.randn(4, 3, count, 7), torch.randn(4, 3, 7), torch.randn(count, 4, 3, 1)
    projected = project(noise, vector)
    torch.testing.assert_close(projected, torch.einsum("abnd,abd->nab", noise, vector).double(), check_dtype=False)
    assert projected.dtype == torch.float64
    torch.testing.assert_close(combine(weights, noise), torch.einsum("nab,abnd->abd", weights.squeeze(-1), noise))
