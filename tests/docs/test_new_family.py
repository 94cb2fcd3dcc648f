# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The families on the page about families pass the checks that the page says to inherit."""

import sys
from types import ModuleType

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch.nn.functional import normalize

from pyro_radial import AutoRadial
from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.testing import DistributionTests, GuideTests
from tests.helpers.distributions import assert_kl_is_that_of_samples
from tests.helpers.pages import DOCS, examples

pytestmark = pytest.mark.site

# A module, so that its classes can be pickled.
PAGE = ModuleType("new_family")
sys.modules[PAGE.__name__] = PAGE
for example in examples(DOCS / "new_family.md"):
    exec(example, vars(PAGE))


class TestLaplaceGuide(GuideTests):
    has_quantiles = False

    def make(self, model, **kwargs):
        return AutoRadial(model, init_stddev=0.1, families={".": PAGE.Laplace()}, **kwargs)


def power_spherical(dtype=torch.float64):
    loc = normalize(torch.randn(3, 4, dtype=dtype), dim=-1)
    return PAGE.PowerSpherical(loc, torch.tensor([0.5, 2.0, 9.0], dtype=dtype))


class TestPowerSpherical(DistributionTests):
    def make(self, dtype=torch.float64):
        return power_spherical(dtype)


def test_the_scale_of_the_page_s_family_is_its_standard_deviation_and_its_kl_that_of_draws():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoRadial(model, init_stddev=0.3, families={"w": PAGE.Laplace()})
    guide.setup()
    posterior, prior = guide.posterior()["w"], dist.Normal(torch.zeros(3), 1.0).to_event(1)
    torch.testing.assert_close(posterior.stddev, torch.full((3,), 0.3))
    assert_kl_is_that_of_samples(posterior, prior)


def test_the_page_s_direction_has_a_beta_cosine_and_the_kl_of_draws():
    direction = power_spherical()
    cosine = (direction.sample((2_000,)) * direction.loc).sum(-1)
    for values, alpha in zip(cosine.T, direction.alpha, strict=True):
        # By chance one in a thousand.
        assert stats.kstest((1 + values.numpy()) / 2, stats.beta(float(alpha), 1.5).cdf).pvalue > 1e-3
    assert_kl_is_that_of_samples(direction, HypersphericalUniform(4))
