# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The distribution on the page about families passes the checks that the page says to inherit."""

import sys
from types import ModuleType

import pytest
import torch
from torch.distributions import kl_divergence
from torch.nn.functional import normalize

from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.testing import DistributionTests
from tests.helpers.pages import DOCS, examples

# A module, so that its classes can be pickled.
PAGE = ModuleType("new_family")
sys.modules[PAGE.__name__] = PAGE
for example in examples(DOCS / "new_family.md")[:3]:
    exec(example, vars(PAGE))


def power_spherical(dtype=torch.float64):
    loc = normalize(torch.tensor([[1.0, 2.0, -0.5, 0.3], [-1.0, 0.2, 0.1, 0.0]], dtype=dtype), dim=-1)
    return PAGE.PowerSpherical(loc, torch.tensor([0.7, 12.0], dtype=dtype))


class TestPowerSpherical(DistributionTests):
    def make(self, dtype=torch.float64):
        return power_spherical(dtype)


def test_the_density_integrates_to_one_over_the_sphere():
    direction, uniform = power_spherical(), HypersphericalUniform(4, like=torch.zeros((), dtype=torch.float64))
    points = uniform.sample((200_000,))
    ratios = (direction.log_prob(points[:, None]) - uniform.log_prob(points)[:, None]).exp()
    error = ratios.std(0) / len(points) ** 0.5
    assert ((ratios.mean(0) - 1).abs() < 4 * error).all()


def test_the_kl_to_the_uniform_direction_is_that_of_draws():
    direction, uniform = power_spherical(), HypersphericalUniform(4, like=torch.zeros((), dtype=torch.float64))
    draws = direction.sample((50_000,))
    ratio = direction.log_prob(draws) - uniform.log_prob(draws)
    exact = kl_divergence(direction, uniform.expand([2]))
    assert exact.tolist() == pytest.approx(ratio.mean(0).tolist(), abs=float(4 * ratio.std(0).max() / 50_000**0.5))
