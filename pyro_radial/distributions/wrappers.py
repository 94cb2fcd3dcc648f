# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions that reshape, mask or repeat another one."""

from typing import Any

from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch.distributions import Independent

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
