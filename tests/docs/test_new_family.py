# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The family on the page about families passes the checks that the page says to inherit."""

import sys
from types import ModuleType

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import kl_divergence

from pyro_radial import AutoRadial
from pyro_radial.testing import GuideTests
from tests.helpers.pages import DOCS, examples

# A module, so that its classes can be pickled.
PAGE = ModuleType("new_family")
sys.modules[PAGE.__name__] = PAGE
exec(examples(DOCS / "new_family.md")[0], vars(PAGE))


class TestLaplaceGuide(GuideTests):
    has_quantiles = False

    def make(self, model, **kwargs):
        return AutoRadial(model, init_stddev=0.1, families={".": PAGE.Laplace()}, **kwargs)


def test_the_scale_of_the_page_s_family_is_its_standard_deviation_and_its_kl_that_of_draws():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoRadial(model, init_stddev=0.3, families={"w": PAGE.Laplace()})
    guide.setup()
    posterior, prior = guide.posterior()["w"], dist.Normal(torch.zeros(3), 1.0).to_event(1)
    torch.testing.assert_close(posterior.stddev, torch.full((3,), 0.3))
    draws = posterior.sample((20_000,))
    ratio = posterior.log_prob(draws) - prior.log_prob(draws)
    assert abs(float(ratio.mean() - kl_divergence(posterior, prior))) < 4 * float(ratio.std()) / 20_000**0.5
