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


ARGUMENTS = {
    RadialNormal: {"loc": ANYTHING, "scale": ANYTHING, "event_dim": st.integers(-1, 4)},
    VonMisesFisherStable: {"loc": tensors(), "concentration": ANYTHING},
    HypersphericalUniform: {"dim": st.integers(-3, 5), "batch_shape": SHAPES, "like": st.none() | tensors()},
    half_cauchy_factors: {"scale": ANYTHING},
}


@pytest.mark.parametrize("make", ARGUMENTS)
@fuzzed
@given(st.data())
def test_anything_is_taken_or_the_argument_named(make, data):
    message = None
    try:
        make(**{name: data.draw(values) for name, values in ARGUMENTS[make].items()})
    except (ValueError, TypeError) as error:
        message = str(error)
    assert message is None or any(name in message for name in ARGUMENTS[make]), message


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
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
