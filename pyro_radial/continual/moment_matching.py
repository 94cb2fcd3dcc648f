# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The normal distribution with the mean and variance of another, element by element."""

from typing import Any

import pyro.distributions as dist
import torch
from torch.distributions import Independent, Normal, TransformedDistribution

from pyro_radial.distributions.wrappers import is_real, leaf


def moment_matched(distribution: Any) -> Any:
    """The factorized normal of a distribution's mean and variance; of a pushforward, that of the base's normal.

    Of all factorized normals it is the one with the least KL from the distribution.

    :raises ValueError: for a distribution without finite variance, or on a part of the real space that no transform
        names.

    >>> from pyro_radial.distributions import RadialNormal
    >>> normal = moment_matched(RadialNormal(torch.zeros(4), torch.ones(4)))
    >>> normal.event_shape, normal.stddev
    (torch.Size([4]), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    inner = leaf(distribution)
    if isinstance(inner, Normal | dist.LogNormal):
        return distribution
    if isinstance(distribution, Independent):
        return moment_matched(distribution.base_dist).to_event(distribution.reinterpreted_batch_ndims)
    if isinstance(distribution, TransformedDistribution):
        return dist.TransformedDistribution(moment_matched(distribution.base_dist), distribution.transforms)
    if not is_real(distribution.support):
        raise ValueError(f"{type(inner).__name__} has no normal of its moments on its support, {distribution.support}")
    mean, stddev = distribution.mean, distribution.variance.sqrt()
    if not bool(torch.isfinite(mean).all() & torch.isfinite(stddev).all()):
        raise ValueError(f"{type(inner).__name__} has no finite mean and variance to match")
    return dist.Normal(mean, stddev, validate_args=False).to_event(distribution.event_dim)
