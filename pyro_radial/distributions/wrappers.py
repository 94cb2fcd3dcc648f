# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions that reshape, mask or repeat another one."""

import copy
from collections.abc import Sequence
from typing import Any

import pyro
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
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
    return _innermost(support) is constraints.real


def is_on_sphere(support: Any) -> bool:
    """Whether a constraint lets unit vectors pass, whatever the shape.

    >>> import pyro.distributions as dist
    >>> is_on_sphere(dist.ProjectedNormal(torch.ones(2, 3)).to_event(1).support), is_on_sphere(constraints.real)
    (True, False)
    """
    return _innermost(support) is constraints.sphere


def _innermost(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def unexpanded(tensor: Tensor, keep: int = 0) -> Tensor:
    """The tensor with its repeated dimensions at size one: the scale of N(0, 1) on a million weights is one number.

    :param int keep: how many of the last dimensions stay as they are.
    """
    strides = tensor.stride()[: tensor.dim() - keep]
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]


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


class Image(pyro.distributions.TransformedDistribution):
    """A transformed distribution that knows its support: torch takes the image of an affine map for the whole line."""

    _support: Any

    @property
    def support(self) -> Any:  # noqa: D102
        return self._support

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """The same distribution with a larger batch shape."""
        return on_support(super().expand(batch_shape, _instance), self._support)


def on_support(distribution: Any, support: Any) -> Any:
    """The distribution, and where it is an image of another, with this as its support.

    >>> import pyro.distributions as dist
    >>> doubled = dist.TransformedDistribution(dist.LogNormal(0.0, 1.0), torch.distributions.AffineTransform(0.0, 2.0))
    >>> doubled.support, on_support(doubled, constraints.positive).support
    (Real(), GreaterThan(lower_bound=0.0))
    """
    new = copy.copy(distribution)
    if type(distribution) in (pyro.distributions.TransformedDistribution, Image):
        new.__class__ = Image
        new._support = support
    elif isinstance(distribution, Independent) and isinstance(support, constraints.independent):
        rest = support.reinterpreted_batch_ndims - distribution.reinterpreted_batch_ndims
        if rest >= 0:
            inner = support.base_constraint
            new.base_dist = on_support(distribution.base_dist, constraints.independent(inner, rest) if rest else inner)
    return new
