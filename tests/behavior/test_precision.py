# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small differences of large numbers, low precision, and the ends of a dtype's range."""

import math

import pyro.distributions as dist
import pytest
import torch
from scipy.special import erfc, exp1
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal


def constant(scale, dim, dtype):
    return RadialNormal(torch.zeros(dim, dtype=dtype), torch.full((dim,), scale, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [None, True, torch.tensor(True)])
def test_nearly_equal_scales_of_a_million_elements_keep_their_digits(dtype, mask):
    first, second = constant(0.0101234, 10**6, dtype), constant(0.0101235, 10**6, dtype)
    for q, p in ((first, second), (second, first)):
        ratio = float(q.scale[0]) / float(p.scale[0])
        exact = 0.5 * (ratio - 1) * (ratio + 1) - math.log1p(ratio - 1)
        value = float(kl_divergence(q, p if mask is None else p.mask(mask)))
        # The ratio is 1 - 1e-5, of which float32 keeps half a percent.
        assert value >= 0.0
        assert value == pytest.approx(exact, rel=2e-2 if dtype == torch.float32 else 1e-5)


@pytest.mark.parametrize("family", ["radial", "normal"])
@pytest.mark.parametrize(("scale", "dtype"), [(1e-20, torch.float32), (1e18, torch.float32), (0.0028, torch.float16)])
def test_the_kl_to_a_normal_does_not_square_the_scales(family, scale, dtype):
    def kl(scale, dtype):
        loc, scale = torch.zeros(5, dtype=dtype), torch.full((5,), scale, dtype=dtype)
        q = RadialNormal(loc, 2 * scale) if family == "radial" else dist.Normal(loc, 2 * scale).to_event(1)
        # Torch's own rule takes two normals, unless one of them is masked.
        return float(kl_divergence(q, dist.Normal(loc, scale).to_event(1).mask(True)))

    assert kl(scale, dtype) == pytest.approx(kl(1.0, torch.float64), rel=2 * torch.finfo(dtype).eps)


def marginal_tail_in_three_dimensions(half_width):
    """A coordinate of a direction is uniform there."""
    return erfc(half_width / math.sqrt(2)) - half_width * exp1(0.5 * half_width**2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("probability", [1e-300, 1e-100, 1e-18, 1e-9, 4e-4, 6e-4, 0.3])
def test_quantiles_far_in_the_tail_have_their_mass_outside(probability):
    one, three = constant(1.0, 1, torch.double), constant(1.0, 3, torch.double)
    normal = float(one.marginal_quantiles([probability]))
    assert 0.5 * erfc(-normal / math.sqrt(2)) == pytest.approx(probability, rel=1e-7)
    radial = float(three.marginal_quantiles([probability])[0, 0])
    # The difference above cancels down to one part in the square of the half width.
    assert 0.5 * marginal_tail_in_three_dimensions(-radial) == pytest.approx(probability, rel=1e-7)
