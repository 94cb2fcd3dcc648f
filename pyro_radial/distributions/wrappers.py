# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The one place that takes distributions apart: whatever repeats, reshapes, masks or transforms another one."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution, TorchDistributionMixin
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import Distribution, Independent, TransformedDistribution
from torch.distributions.transforms import AffineTransform, ComposeTransform, IndependentTransform, Transform

from pyro_radial._pyro.compat import own_mask
from pyro_radial.distributions.special import accumulation_dtype

__all__ = [
    "Pushforward",
    "carry_to_batch",
    "elementary",
    "expanded",
    "leaf",
    "map_leaf",
    "mask_of",
    "on_support",
    "pull_back",
    "to_like",
    "unexpanded",
    "unmasked",
]

WRAPPERS = (Independent, MaskedDistribution, ExpandedDistribution)


def leaf(distribution: Any) -> Any:
    """The distribution inside any nesting of ``to_event``, ``mask`` and ``expand``; a transformed one is a leaf.

    Example::

        >>> type(leaf(dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1).mask(True))).__name__
        'Normal'
    """
    while isinstance(distribution, WRAPPERS):
        distribution = distribution.base_dist
    return distribution


def map_leaf(function: Callable[[Any], Any], distribution: Any) -> Any:
    """The same nesting around ``function(leaf)``; the distribution itself where the leaf stays what it is.

    :param function: from a distribution to one of the same batch and event shape.
    :param distribution: any nesting; it is not changed.

    Example::

        >>> rows = dist.Normal(torch.zeros(2, 3), 1.0).to_event(1).mask(torch.tensor([True, False]))
        >>> map_leaf(lambda normal: dist.Laplace(normal.loc, normal.scale), rows).log_prob(torch.zeros(2, 3))
        tensor([-2.0794,  0.0000])
    """
    if not isinstance(distribution, WRAPPERS):
        return function(distribution)
    inner = map_leaf(function, distribution.base_dist)
    if inner is distribution.base_dist:
        return distribution
    if isinstance(distribution, Independent):
        return dist.Independent(inner, distribution.reinterpreted_batch_ndims, validate_args=False)
    if isinstance(distribution, MaskedDistribution):
        return MaskedDistribution(inner, own_mask(distribution))
    return expanded(inner, distribution.batch_shape)


def carry_to_batch(of_leaf: Callable[[Any], Tensor], distribution: Any) -> Tensor:
    """A quantity that the leaf has for each element of its batch, as that of the whole nesting.

    As a log-density it is summed over dimensions that became part of the event, zero where masked, and repeated where
    expanded.

    :param of_leaf: from the leaf to a tensor that has its batch shape or broadcasts over it.
    :param distribution: any nesting.

    Example::

        >>> carry_to_batch(lambda normal: normal.entropy(), dist.Normal(torch.zeros(3), 1.0).to_event(1))
        tensor(4.2568, dtype=torch.float64)
    """
    if not isinstance(distribution, WRAPPERS):
        return of_leaf(distribution)
    value = carry_to_batch(of_leaf, distribution.base_dist)
    if isinstance(distribution, MaskedDistribution):
        return scale_and_mask(value, mask=own_mask(distribution))
    if isinstance(distribution, ExpandedDistribution):
        return value.expand(torch.broadcast_shapes(value.shape, distribution.batch_shape))
    dims = tuple(range(-distribution.reinterpreted_batch_ndims, 0))
    return value.sum(dims, dtype=accumulation_dtype(value)) if dims else value


def mask_of(distribution: Any) -> Any:
    """The mask over the batch, a tensor or a bool; None where there is none.

    :raises ValueError: naming the classes, where it masks single elements of the event.

    Example::

        >>> mask_of(dist.Normal(torch.zeros(2, 3), 1.0).to_event(1).mask(torch.tensor([True, False])))
        tensor([ True, False])
    """
    mask, event_dims = None, 0
    while isinstance(distribution, WRAPPERS):
        if isinstance(distribution, MaskedDistribution):
            if event_dims:
                raise ValueError(f"{type(leaf(distribution)).__name__} is masked inside its event")
            own = own_mask(distribution)
            mask = own if mask is None else mask & own
        if isinstance(distribution, Independent):
            event_dims += distribution.reinterpreted_batch_ndims
        distribution = distribution.base_dist
    return mask


def unmasked(distribution: Any) -> Any:
    """The same distribution without its masks, which say nothing of its draws.

    Example::

        >>> unmasked(dist.Normal(torch.zeros(3), 1.0).mask(False).to_event(1)).log_prob(torch.zeros(3))
        tensor(-2.7568)
    """
    if isinstance(distribution, MaskedDistribution):
        return unmasked(distribution.base_dist)
    if not isinstance(distribution, (*WRAPPERS, TransformedDistribution)):
        return distribution
    inner = unmasked(distribution.base_dist)
    if inner is distribution.base_dist:
        return distribution
    new = copy.copy(distribution)
    new.base_dist = inner
    return new


def pull_back(distribution: Any, transforms: Sequence[Transform]) -> Any:
    """The distribution whose pushforward under ``transforms`` is the one given.

    Transforms that the two have in common cancel; of what is left over, the inverse is applied.

    :param distribution: any nesting without masks.
    :param transforms: bijections in the order of their application, elementary ones.
    :raises NotImplementedError: for a masked distribution: what is left out of its density has no preimage.

    Example::

        >>> from torch.distributions import ExpTransform
        >>> pull_back(dist.LogNormal(torch.zeros(3), 1.0).to_event(1), [ExpTransform()]).base_dist
        Normal(loc: torch.Size([3]), scale: torch.Size([3]))
    """
    if not transforms:
        return distribution
    if _is_masked(distribution):
        raise NotImplementedError(f"{type(leaf(distribution)).__name__} is masked, so that it has no preimage")
    return map_leaf(lambda inner: _pulled_back(inner, list(transforms)), distribution)


def _is_masked(distribution: Any) -> bool:
    while isinstance(distribution, WRAPPERS):
        if isinstance(distribution, MaskedDistribution):
            return True
        distribution = distribution.base_dist
    return False


def _pulled_back(distribution: Any, transforms: list[Transform]) -> Any:
    if isinstance(distribution, TransformedDistribution):
        own = elementary(distribution.transforms)
        if own == transforms[len(transforms) - len(own) :]:
            return pull_back(distribution.base_dist, transforms[: len(transforms) - len(own)])
        front = len(own) - len(transforms)
        if front > 0 and own[front:] == transforms:
            return dist.TransformedDistribution(distribution.base_dist, own[:front], validate_args=False)
    inverses = [transform.inv for transform in reversed(transforms)]
    return dist.TransformedDistribution(distribution, inverses, validate_args=False)


def elementary(transforms: Sequence[Transform]) -> list[Transform]:
    """The transforms with composition, reinterpreted dimensions and the trivial affine map peeled off.

    Example::

        >>> from torch.distributions import biject_to, constraints
        >>> elementary([biject_to(constraints.independent(constraints.greater_than(0.0), 1))])
        [ExpTransform()]
    """
    flat: list[Transform] = []
    for transform in transforms:
        if isinstance(transform, IndependentTransform):
            flat += elementary([transform.base_transform])
        elif isinstance(transform, ComposeTransform):
            flat += elementary(transform.parts)
        elif not _is_identity(transform):
            flat.append(transform)
    return flat


def _is_identity(transform: Transform) -> bool:
    # biject_to(positive) is exp followed by an affine map with these very numbers.
    if not isinstance(transform, AffineTransform) or isinstance(transform.loc, Tensor):
        return False
    return transform.loc == 0 and not isinstance(transform.scale, Tensor) and transform.scale == 1


def expanded(distribution: Any, batch_shape: Sequence[int]) -> Any:
    """The distribution with a larger batch; unlike some of Pyro's own ``expand``, never changes the one given.

    Example::

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


def unexpanded(tensor: Tensor, keep: int = 0) -> Tensor:
    """The tensor with its repeated dimensions at size one: the scale of N(0, 1) on a million weights is one number.

    :param int keep: how many of the last dimensions stay as they are.

    Example::

        >>> unexpanded(torch.ones(()).expand(3, 2)).shape
        torch.Size([1, 1])
    """
    strides = tensor.stride()[: tensor.dim() - keep]
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]


def to_like(distribution: Any, like: Tensor) -> Any:
    """The same distribution with its tensors on the device and, where floating, in the dtype of ``like``.

    :param distribution: any distribution, with those inside it; it is not changed.
    :param Tensor like: a tensor of the wanted device and dtype.

    Example::

        >>> to_like(dist.Normal(0.0, 1.0).expand([3]).to_event(1), torch.zeros((), dtype=torch.float64)).mean.dtype
        torch.float64
    """
    return _moved(distribution, like, {})


def _moved(value: Any, like: Tensor, done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, like, done) for item in value)
    if not isinstance(value, Distribution | TorchDistributionMixin | Transform):
        return value
    # A transform that was used knows its inverse, which knows the transform.
    if id(value) not in done:
        done[id(value)] = clone = copy.copy(value)
        # Copying a transform forgets its inverse, without which that of another is none.
        for key, item in vars(value).items():
            clone.__dict__[key] = _moved(item, like, done)
    return done[id(value)]


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
