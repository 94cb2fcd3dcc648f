# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Tensors of any shape and dtype, and any number: finite results, or an error that names the argument."""

import math

import pyro.distributions as dist
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributions import kl_divergence

from pyro_radial.distributions import HypersphericalUniform, RadialNormal, VonMisesFisherStable
from pyro_radial.distributions.half_cauchy import half_cauchy_factors

COUNT = 25
fuzzed = settings(max_examples=COUNT, deadline=None, derandomize=True, database=None)

SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64])
NUMBERS = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, -1.0, math.inf, -math.inf, math.nan, 1e30]))


@st.composite
def tensors(draw):
    return torch.full(draw(SHAPES), draw(NUMBERS), dtype=torch.float64).to(draw(DTYPES))


ANYTHING = st.one_of(tensors(), tensors(), NUMBERS)


def made(name, make, *arguments):
    """What it makes, or None for a ValueError or TypeError that says which argument."""
    try:
        return make(*arguments)
    except (ValueError, TypeError) as error:
        message = str(error)
    assert any(word in message for word in name.split()), message
    return None


@fuzzed
@given(ANYTHING, ANYTHING, st.integers(-1, 4))
def test_radial_normal_takes_anything_or_says_what_it_does_not(loc, scale, event_dim):
    made("loc scale event_dim", RadialNormal, loc, scale, event_dim)


@fuzzed
@given(tensors(), ANYTHING)
def test_von_mises_fisher_takes_anything_or_says_what_it_does_not(loc, concentration):
    made("loc concentration", VonMisesFisherStable, loc, concentration)


@fuzzed
@given(st.integers(-3, 5), SHAPES, st.one_of(st.none(), tensors()))
def test_the_uniform_takes_anything_or_says_what_it_does_not(dim, batch_shape, like):
    made("dim batch_shape like", lambda *a: HypersphericalUniform(a[0], a[1], like=a[2]), dim, batch_shape, like)


@fuzzed
@given(ANYTHING)
def test_the_half_cauchy_takes_anything_or_says_what_it_does_not(scale):
    made("scale", half_cauchy_factors, scale)


# --- finite numbers from arguments of the dtype's ordinary range


def assert_finite(distribution, other, parameters):
    value = distribution.rsample()
    # A draw that rounds to the location has an infinite density.
    assume(not torch.equal(value, distribution.mean))
    results = [value, distribution.log_prob(value), distribution.entropy(), distribution.mean, distribution.variance]
    results += [kl_divergence(distribution, other), kl_divergence(other, distribution)]
    assert all(bool(torch.isfinite(result).all()) for result in results)
    gradients = torch.autograd.grad(sum(r.double().sum() for r in results), parameters, allow_unused=True)
    assert all(g is None or bool(torch.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@fuzzed
@given(st.data())
def test_radial_numbers_are_finite(dtype, data):
    # Squares of ratios, and their gradients over a scale, must be in range too.
    low, high = {torch.float32: (1e-4, 1e4), torch.float64: (1e-30, 1e30)}[dtype]
    size = data.draw(st.integers(1, 5))
    sizes = st.floats(math.log(low), math.log(high)).map(math.exp)
    rows = [torch.tensor(data.draw(st.lists(sizes, min_size=size, max_size=size)), dtype=dtype) for _ in range(4)]
    parameters = [row.requires_grad_() for row in rows]
    assert_finite(RadialNormal(*parameters[:2]), RadialNormal(*parameters[2:]), parameters)
    q, p = RadialNormal(*parameters[:2]), dist.Normal(*parameters[2:]).to_event(1)
    kl = kl_divergence(q, p)
    assert bool(torch.isfinite(kl))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@fuzzed
@given(st.data())
def test_directional_numbers_are_finite(dtype, data):
    low, high = {torch.float16: (1e-2, 1e2), torch.float32: (1e-6, 1e6), torch.float64: (1e-12, 1e12)}[dtype]
    dim = data.draw(st.sampled_from([2, 3, 4, 10, 300]))
    sizes = st.one_of(st.just(0.0), st.floats(math.log(low), math.log(high)).map(math.exp))
    loc = torch.nn.functional.normalize(torch.randn(2, dim, dtype=torch.double), dim=-1).to(dtype)
    rows = [torch.tensor(data.draw(sizes), dtype=dtype).requires_grad_() for _ in range(2)]
    q, p = (VonMisesFisherStable(loc[i], rows[i], validate_args=dtype != torch.float16) for i in range(2))
    assert_finite(q, p, rows)
    assert_finite(q, HypersphericalUniform(dim), rows)
