# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro.distributions as dist
import pytest
import torch

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.wrappers import leaf

BASES = {"radial": RadialNormal(torch.zeros(3, 2), torch.ones(3, 2)), "normal": dist.Normal(torch.zeros(3), 1.0)}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES.keys())
def test_every_nesting_is_seen_through(base):
    assert leaf(base) is base
    assert leaf(base.to_event(1)) is base
    assert leaf(base.mask(True).to_event(1)) is base
    assert leaf(base.to_event(1).mask(True)) is base
    assert type(leaf(base.mask(True).expand([4, 3]))) is type(base)


def test_a_transformed_law_is_a_leaf_of_its_own():
    law = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.SigmoidTransform()])
    assert leaf(law) is law
