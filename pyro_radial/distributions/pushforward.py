# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A transformed distribution that knows where its values lie."""

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch.distributions import Independent

__all__ = ["Pushforward", "on_support"]


class Pushforward(dist.TransformedDistribution):
    """The pushforward of a distribution, with its support given: torch takes that of an affine map for the whole line.

    :param base_distribution: the distribution of what is transformed.
    :param transforms: bijections, in the order of their application.
    :param support: the constraint that the values meet.

    Example::

        >>> doubling = torch.distributions.AffineTransform(0.0, 2.0)
        >>> Pushforward(dist.LogNormal(0.0, 1.0), [doubling], constraints.positive).support
        GreaterThan(lower_bound=0.0)
    """

    def __init__(self, base_distribution: Any, transforms: Any, support: Any) -> None:
        super().__init__(base_distribution, transforms, validate_args=False)
        self._support = support

    @property
    def support(self) -> Any:  # noqa: D102
        return self._support

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> "Pushforward":
        """The same distribution with a larger batch shape."""
        repeated = dist.TransformedDistribution(self.base_dist, self.transforms, validate_args=False).expand(
            torch.Size(batch_shape)
        )
        return Pushforward(repeated.base_dist, repeated.transforms, self._support)


def on_support(distribution: Any, support: Any) -> Any:
    """The distribution, and where it is a plain pushforward of another, with this as its support.

    Example::

        >>> doubling = torch.distributions.AffineTransform(0.0, 2.0)
        >>> doubled = dist.TransformedDistribution(dist.LogNormal(0.0, 1.0), doubling)
        >>> doubled.support, on_support(doubled, constraints.positive).support
        (Real(), GreaterThan(lower_bound=0.0))
    """
    if type(distribution) in (dist.TransformedDistribution, Pushforward):
        return Pushforward(distribution.base_dist, distribution.transforms, support)
    if isinstance(distribution, Independent) and isinstance(support, constraints.independent):
        own = distribution.reinterpreted_batch_ndims
        rest = support.reinterpreted_batch_ndims - own
        if rest >= 0:
            inner = support.base_constraint
            base = on_support(distribution.base_dist, constraints.independent(inner, rest) if rest else inner)
            return dist.Independent(base, own, validate_args=False)
    return distribution
