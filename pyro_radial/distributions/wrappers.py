# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions that reshape, mask or repeat another one."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch.distributions import Independent, TransformedDistribution

WRAPPERS = (Independent, MaskedDistribution, ExpandedDistribution)


def leaf(distribution: Any) -> Any:
    """The distribution inside any nesting of wrappers.

    >>> import pyro.distributions as dist
    >>> type(leaf(dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1).mask(True))).__name__
    'Normal'
    """
    while isinstance(distribution, WRAPPERS):
        distribution = distribution.base_dist
    return distribution


def is_real(support: Any) -> bool:
    """Whether a constraint lets every real value pass, whatever the shape.

    >>> import pyro.distributions as dist
    >>> is_real(dist.Normal(0.0, 1.0).expand([3]).to_event(1).support), is_real(dist.LogNormal(0.0, 1.0).support)
    (True, False)
    """
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real


def expanded(distribution: Any, batch_shape: Sequence[int]) -> Any:
    """The distribution with a larger batch; unlike some of Pyro's own ``expand``, never changes the one given.

    >>> import pyro.distributions as dist
    >>> repeated = ExpandedDistribution(dist.Normal(0.0, 1.0))
    >>> expanded(repeated, [3]).shape(), repeated.shape()
    (torch.Size([3]), torch.Size([]))
    """
    return _own_copy(distribution).expand(torch.Size(batch_shape))


def _own_copy(distribution: Any) -> Any:
    """A copy down to the leaf, whose wrappers may be changed; tensors are shared."""
    if not isinstance(distribution, (*WRAPPERS, TransformedDistribution)):
        return distribution
    clone = copy.copy(distribution)
    clone.base_dist = _own_copy(distribution.base_dist)
    return clone
