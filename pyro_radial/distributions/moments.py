# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The center and the first two moments of a distribution, also in the unconstrained space of a guide."""

from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    LogNormal,
    Normal,
    ReshapeTransform,
    Transform,
    TransformedDistribution,
)

from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.wrappers import (
    TRANSFORMED,
    drop_repeats,
    elementary,
    leaf,
    map_leaf,
    pull_back,
    remove_masks,
    with_base,
)


class Moments(NamedTuple):
    """The mean and the standard deviation of each element; each is None if it is unknown or infinite."""

    mean: Tensor | None
    stddev: Tensor | None


def center(distribution: Distribution) -> Tensor:
    """Return the value of a distribution without noise: the mean, or the transformed mean of the base."""
    inner = leaf(distribution)
    if isinstance(inner, TransformedDistribution):
        value = center(inner.base_dist)
        for transform in inner.transforms:
            value = transform(value)
    elif not inner.has_rsample:
        raise ValueError(f"{type(inner).__name__} has no mean among its values")
    else:
        try:
            value = inner.mean
        except (NotImplementedError, AttributeError):
            raise ValueError(f"{type(inner).__name__} has no mean in closed form") from None
    return value.expand(distribution.batch_shape + distribution.event_shape)


def moments(distribution: Any, transform: Transform | None = None) -> Moments:
    """Return mean and standard deviation of a distribution, before a transform if one is given.

    If the preimage has no known mean, the result is the preimage of the distribution's mean, without a deviation.
    """
    distribution = remove_masks(distribution)
    if transform is None:
        return _own_moments(distribution)
    preimage_moments = _own_moments(pull_back(distribution, elementary([transform])))
    if preimage_moments.mean is not None:
        return preimage_moments
    mean = _own_moments(distribution).mean
    return Moments(None if mean is None else _if_finite(transform.inv(mean)), None)


def _own_moments(distribution: Distribution) -> Moments:
    inner = leaf(distribution)
    mean, stddev = _push_forward(inner) if _is_affine(inner) else _read_moments(inner)
    if mean is None:
        return Moments(None, None)
    shape = distribution.batch_shape + distribution.event_shape
    return Moments(mean.expand(shape), None if stddev is None else stddev.expand(shape))


def _is_affine(distribution: Any) -> bool:
    """Return whether this is an affine function of another distribution, element by element, in any shape."""
    return type(distribution) in TRANSFORMED and all(
        isinstance(transform, AffineTransform | ReshapeTransform)
        for transform in elementary(distribution.transforms)
    )


def _is_affine_on_the_line(distribution: Any) -> bool:
    """Return whether values everywhere on the line are possible, which torch says of every affine function."""
    base = leaf(distribution.base_dist)
    return _is_affine(distribution) and (
        _is_affine_on_the_line(base) if type(base) in TRANSFORMED else is_real(base.support)
    )


def _push_forward(distribution: Any) -> tuple[Tensor | None, Tensor | None]:
    mean, stddev = _own_moments(distribution.base_dist)
    for transform in elementary(distribution.transforms):
        mean = None if mean is None else transform(mean)
        if stddev is not None:
            if isinstance(transform, ReshapeTransform):
                stddev = transform(stddev)
            else:
                stddev = stddev * abs(transform.scale)  # type: ignore[attr-defined]
    return mean, stddev


def _read_moments(distribution: object) -> tuple[Tensor | None, Tensor | None]:
    """Return the distribution's own mean and standard deviation, if they are finite."""
    mean = _read_finite(distribution, "mean")
    variance = _read_finite(distribution, "variance")
    if variance is None or not bool((variance > 0).all()):
        return mean, None
    return mean, drop_repeats(variance).sqrt()


def _read_finite(distribution: object, name: str) -> Tensor | None:
    try:
        return _if_finite(getattr(distribution, name))
    except (NotImplementedError, AttributeError):
        return None


def _if_finite(tensor: Tensor) -> Tensor | None:
    return tensor if bool(torch.isfinite(tensor).all()) else None


def match_moments(distribution: object) -> Any:
    """Return the factorized normal with the mean and variance of a distribution, which has the least KL from it.

    A transformed distribution keeps its transforms around the normal of its base, and any distribution its wrappers.
    """
    return map_leaf(_match_leaf, distribution)


def _match_leaf(distribution: Any) -> Any:
    if isinstance(distribution, Normal | LogNormal):
        return distribution
    if type(distribution) in TRANSFORMED and not _is_affine_on_the_line(distribution):
        return with_base(distribution, match_moments(distribution.base_dist))
    if not is_real(distribution.support):
        raise ValueError(
            f"{type(distribution).__name__} cannot be matched by a normal distribution: its support is "
            f"{distribution.support}"
        )
    mean, stddev = _own_moments(distribution)
    if mean is None or stddev is None:
        raise ValueError(f"{type(distribution).__name__} has no finite mean and variance to match")
    return dist.Normal(mean, stddev, validate_args=False).to_event(distribution.event_dim)
