# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Take apart distributions that repeat, reshape, mask or transform another one."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import (
    ExpandedDistribution,
    MaskedDistribution,
    TorchDistributionMixin,
)
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    ComposeTransform,
    Distribution,
    Independent,
    IndependentTransform,
    ReshapeTransform,
    Transform,
    TransformedDistribution,
)

from pyro_radial._pyro.compat import own_mask
from pyro_radial.distributions.numerics import accumulation_dtype

WRAPPERS = (Independent, MaskedDistribution, ExpandedDistribution)


def leaf(distribution: object) -> Any:
    """Return the distribution inside any ``to_event``, ``mask`` and ``expand``; a transformed one is a leaf."""
    *_, inner = _layers(distribution)
    return inner


def _layers(distribution: object) -> Iterator[Any]:
    """Yield the distribution, and what is inside each of its wrappers."""
    yield distribution
    while isinstance(distribution, WRAPPERS):
        distribution = distribution.base_dist
        yield distribution


def map_leaf(function: Callable[[Any], object], distribution: object) -> Any:
    """Return the same nesting around ``function(leaf)``, or the given one if ``function`` returns its argument."""
    if not isinstance(distribution, WRAPPERS):
        return function(distribution)
    inner = map_leaf(function, distribution.base_dist)
    if inner is distribution.base_dist:
        return distribution
    if isinstance(distribution, Independent):
        return dist.Independent(inner, distribution.reinterpreted_batch_ndims, validate_args=False)
    if isinstance(distribution, MaskedDistribution):
        return MaskedDistribution(inner, own_mask(distribution))
    return expand_copy(inner, distribution.batch_shape)


def carry_to_batch(of_leaf: Callable[[Any], Tensor], distribution: object) -> Tensor:
    """Sum, mask and expand a quantity of the leaf, such as its entropy, as the wrappers do with a log-density."""
    if not isinstance(distribution, WRAPPERS):
        return of_leaf(distribution)
    value = carry_to_batch(of_leaf, distribution.base_dist)
    if isinstance(distribution, MaskedDistribution):
        return scale_and_mask(value, mask=own_mask(distribution))
    if isinstance(distribution, ExpandedDistribution):
        return value.expand(torch.broadcast_shapes(value.shape, distribution.batch_shape))
    dims = tuple(range(-distribution.reinterpreted_batch_ndims, 0))
    return value.sum(dims, dtype=accumulation_dtype(value)) if dims else value


def mask_of(distribution: object) -> Any:
    """Return the mask over the batch, or None; a ValueError if a mask covers single elements of the event."""
    mask, event_dims = None, 0
    for layer in _layers(distribution):
        if isinstance(layer, MaskedDistribution):
            if event_dims:
                raise ValueError(f"{type(leaf(layer)).__name__} is masked inside its event")
            layer_mask = own_mask(layer)
            mask = layer_mask if mask is None else mask & layer_mask
        if isinstance(layer, Independent):
            event_dims += layer.reinterpreted_batch_ndims
    return mask


def remove_masks(distribution: object) -> Any:
    """Return the same distribution without masks; its draws are the same."""
    if isinstance(distribution, MaskedDistribution):
        return remove_masks(distribution.base_dist)
    if not isinstance(distribution, (*WRAPPERS, TransformedDistribution)):
        return distribution
    inner = remove_masks(distribution.base_dist)
    return distribution if inner is distribution.base_dist else with_base(distribution, inner)


def with_base(distribution: Any, base: object) -> Any:
    """Return the same wrapper around another distribution of the same shape."""
    wrapper = copy.copy(distribution)
    wrapper.base_dist = base
    return wrapper


def pull_back(distribution: object, transforms: Sequence[Transform]) -> Any:
    """Return the distribution whose pushforward under ``transforms`` is the given one.

    Transforms that both have cancel; the inverses of the others are applied. A masked distribution has no preimage.
    """
    if not transforms:
        return distribution
    if any(isinstance(layer, MaskedDistribution) for layer in _layers(distribution)):
        raise NotImplementedError(
            f"{type(leaf(distribution)).__name__} is masked, so it has no preimage"
        )
    return map_leaf(lambda inner: _pull_back_leaf(inner, list(transforms)), distribution)


def _pull_back_leaf(distribution: object, transforms: list[Transform]) -> Any:
    if isinstance(distribution, TransformedDistribution):
        applied_transforms = elementary(distribution.transforms)
        if applied_transforms == transforms[len(transforms) - len(applied_transforms) :]:
            return pull_back(
                distribution.base_dist, transforms[: len(transforms) - len(applied_transforms)]
            )
        front = len(applied_transforms) - len(transforms)
        if front > 0 and applied_transforms[front:] == transforms:
            return dist.TransformedDistribution(
                distribution.base_dist, applied_transforms[:front], validate_args=False
            )
    inverses = [transform.inv for transform in reversed(transforms)]
    return dist.TransformedDistribution(distribution, inverses, validate_args=False)


def elementary(transforms: Sequence[Transform]) -> list[Transform]:
    """Return the transforms without composition, reinterpreted dimensions and identity affine maps."""
    flat: list[Transform] = []
    for transform in transforms:
        if isinstance(transform, IndependentTransform):
            flat += elementary([transform.base_transform])
        elif isinstance(transform, ComposeTransform):
            flat += elementary(transform.parts)
        elif not _is_identity(transform):
            flat.append(transform)
    return flat


def is_reshape(transforms: Sequence[Transform]) -> bool:
    """Return whether there are transforms, and they change shapes alone."""
    return {type(transform) for transform in elementary(transforms)} == {ReshapeTransform}


def _is_identity(transform: Transform) -> bool:
    # biject_to(positive) is exp followed by an affine map with these numbers.
    if not isinstance(transform, AffineTransform) or isinstance(transform.loc, Tensor):
        return False
    return transform.loc == 0 and not isinstance(transform.scale, Tensor) and transform.scale == 1


def expand_copy(distribution: object, batch_shape: Sequence[int]) -> Any:
    """Return the distribution with a larger batch; unlike some ``expand`` in Pyro, it changes nothing in place."""
    return copy_wrappers(distribution).expand(torch.Size(batch_shape))


def copy_wrappers(distribution: object) -> Any:
    """Copy the wrappers down to the leaf, so that they may be changed; tensors are shared."""
    if not isinstance(distribution, (*WRAPPERS, TransformedDistribution)):
        return distribution
    return with_base(distribution, copy_wrappers(distribution.base_dist))


def drop_repeats(tensor: Tensor, keep: int = 0) -> Tensor:
    """Return the tensor with its repeated dimensions at size one, except the last ``keep``."""
    strides = tensor.stride()[: tensor.dim() - keep]
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]


def to_like(distribution: object, like: Tensor) -> Any:
    """Return the same distribution with all tensors on the device and floating ones in the dtype of ``like``."""
    return _to_like(distribution, like, {})


def _to_like(value: Any, like: Tensor, copies: dict[int, object]) -> Any:
    if isinstance(value, Tensor):
        return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)
    if type(value) in (list, tuple):
        return type(value)(_to_like(item, like, copies) for item in value)
    if not isinstance(value, Distribution | TorchDistributionMixin | Transform):
        return value
    # A used transform refers to its inverse, which refers to the transform.
    if id(value) not in copies:
        copies[id(value)] = clone = copy.copy(value)
        # Copying a transform drops its inverse; an inverse transform cannot do without.
        for key, item in vars(value).items():
            clone.__dict__[key] = _to_like(item, like, copies)
    return copies[id(value)]


class Transformed(dist.TransformedDistribution):
    """A distribution on a constrained support that says how to get the moments it does not know."""

    @property
    def mean(self) -> Tensor:  # noqa: D102
        raise NotImplementedError(
            "mean and variance of a transformed distribution have no closed form: average draws, such as "
            "distribution.sample((10_000,)).mean(0), or take guide.median()"
        )

    variance = mean


class Pushforward(dist.TransformedDistribution):
    """Transform a distribution, with a given support: torch takes the whole line for the support of an affine map."""

    def __init__(self, base_distribution: object, transforms: object, support: object) -> None:
        super().__init__(base_distribution, transforms, validate_args=False)
        self._support = support

    @property
    def support(self) -> Any:  # noqa: D102
        return self._support

    def expand(self, batch_shape: Sequence[int], _instance: object = None) -> "Pushforward":
        """Return the same distribution with a larger batch shape."""
        plain = dist.TransformedDistribution(self.base_dist, self.transforms, validate_args=False)
        repeated = plain.expand(torch.Size(batch_shape))
        return Pushforward(repeated.base_dist, repeated.transforms, self._support)


# Plain transformed distributions, which have no closed-form moments.
TRANSFORMED = (TransformedDistribution, dist.TransformedDistribution, Transformed, Pushforward)


def on_support(distribution: Any, support: Any) -> Any:
    """Return the distribution, with the given support if it is a plain transformed one."""
    if type(distribution) in TRANSFORMED:
        return Pushforward(distribution.base_dist, distribution.transforms, support)
    if isinstance(distribution, Independent) and isinstance(support, constraints.independent):
        event_dims = distribution.reinterpreted_batch_ndims
        remaining_dims = support.reinterpreted_batch_ndims - event_dims
        if remaining_dims >= 0:
            inner = support.base_constraint
            base = on_support(
                distribution.base_dist,
                constraints.independent(inner, remaining_dims) if remaining_dims else inner,
            )
            return dist.Independent(base, event_dims, validate_args=False)
    return distribution
