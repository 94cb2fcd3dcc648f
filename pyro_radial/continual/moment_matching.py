# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The normal law with the mean and variance of another, element by element."""

from typing import Any

import pyro.distributions as dist
import torch
from torch.distributions import Independent, Normal, TransformedDistribution

from pyro_radial.distributions.wrappers import is_real, leaf


def moment_matched(law: Any) -> Any:
    """The factorised normal of a law's mean and variance; of the image of a law, the image of its normal.

    Of all factorised normals it is the one with the least KL from the law.

    :raises ValueError: for a law without finite variance, or on a part of the real space that no transform names.

    >>> from pyro_radial.distributions import RadialNormal
    >>> normal = moment_matched(RadialNormal(torch.zeros(4), torch.ones(4)))
    >>> normal.event_shape, normal.stddev
    (torch.Size([4]), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    inner = leaf(law)
    if isinstance(inner, Normal | dist.LogNormal):
        return law
    if isinstance(law, Independent):
        return moment_matched(law.base_dist).to_event(law.reinterpreted_batch_ndims)
    if isinstance(law, TransformedDistribution):
        return dist.TransformedDistribution(moment_matched(law.base_dist), law.transforms)
    if not is_real(law.support):
        raise ValueError(f"{type(inner).__name__} has no normal of its moments on its support, {law.support}")
    mean, stddev = law.mean, law.variance.sqrt()
    if not bool(torch.isfinite(mean).all() & torch.isfinite(stddev).all()):
        raise ValueError(f"{type(inner).__name__} has no finite mean and variance to match")
    return dist.Normal(mean, stddev, validate_args=False).to_event(law.event_dim)
