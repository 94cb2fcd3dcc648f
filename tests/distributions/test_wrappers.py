# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro.distributions as dist
import pytest
import torch

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.wrappers import expand_copy, leaf
from tests.helpers.distributions import Halves


def test_a_transformed_distribution_is_a_leaf_of_its_own():
    distribution = dist.TransformedDistribution(dist.Normal(0.0, 1.0), [dist.transforms.SigmoidTransform()])
    assert leaf(distribution) is distribution


EXPANDED = {
    "base": dist.Normal(torch.zeros(3), 1.0),
    "general": Halves().expand([3]),
    "inside an event": Halves().expand([3, 2]).to_event(1),
    "masked": Halves().expand([3]).mask(torch.tensor([True, False, True])),
    "transformed": dist.TransformedDistribution(Halves().expand([3]), [dist.transforms.ExpTransform()]),
    "transformed event": dist.TransformedDistribution(
        Halves().expand([3, 2]).to_event(1), [dist.transforms.ExpTransform()]
    ),
    "radial": RadialNormal(torch.zeros(3, 2), torch.ones(3, 2)).mask(True),
}


@pytest.mark.parametrize("distribution", EXPANDED.values(), ids=EXPANDED.keys())
def test_expanded_never_changes_the_distribution_that_it_is_given(distribution):
    before = structure(distribution)
    larger, largest = expand_copy(distribution, [4, 3]), expand_copy(distribution, [5, 1, 3])
    assert larger.batch_shape == torch.Size([4, 3])
    assert largest.batch_shape == torch.Size([5, 1, 3])
    assert larger.event_shape == distribution.event_shape
    assert larger.sample().shape == (4, 3, *distribution.event_shape)
    expand_copy(larger, [2, 4, 3])
    assert larger.batch_shape == torch.Size([4, 3])
    assert structure(distribution) == before
    assert distribution.sample().shape == distribution.shape()


def structure(distribution):
    """The classes and shapes of a distribution and of those inside it."""
    inside = structure(distribution.base_dist) if hasattr(distribution, "base_dist") else []
    return [(type(distribution), tuple(distribution.batch_shape), tuple(distribution.event_shape)), *inside]


def test_what_does_not_expand_is_an_error_and_changes_nothing():
    for distribution in EXPANDED.values():
        before = structure(distribution)
        with pytest.raises((RuntimeError, ValueError)):
            expand_copy(distribution, [4])
        assert structure(distribution) == before
