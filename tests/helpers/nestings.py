# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every way to wrap a distribution: events, expansion, masks and two transforms, up to three deep."""

from itertools import product

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch.distributions.transforms import AffineTransform, ExpTransform

from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.distributions.wrappers import expanded

EXP, AFFINE = ExpTransform(), AffineTransform(0.5, 2.0)
OPERATIONS = ("event", "expand", "mask", "exp", "affine")
DEPTH = 3


def mask_for(distribution):
    """A mask that hides every other element of the batch."""
    shape = distribution.batch_shape
    return (torch.arange(max(1, shape.numel())) % 2 == 0)[: shape.numel()].reshape(shape)


def applied(operation, distribution):
    """The distribution wrapped once more, or None where that makes no sense."""
    if operation == "event":
        return distribution.to_event(1) if distribution.batch_shape else None
    if operation == "expand":
        return expanded(distribution, (2, *distribution.batch_shape))
    if operation == "mask":
        return distribution.mask(mask_for(distribution))
    if operation == "exp" and not is_real(distribution.support):
        return None
    # On the sphere neither makes sense; an affine map of positive values is on the whole line for torch.
    if is_on_sphere(distribution.support):
        return None
    return dist.TransformedDistribution(distribution, [EXP if operation == "exp" else AFFINE])


def nestings(distribution):
    """``(operations, wrapped distribution)`` for every sequence of operations that makes sense, the empty one first."""
    for depth in range(DEPTH + 1):
        for operations in product(OPERATIONS, repeat=depth):
            wrapped = distribution
            for operation in operations:
                wrapped = None if wrapped is None else applied(operation, wrapped)
            if wrapped is not None:
                yield operations, wrapped


def without_masks(operations, distribution):
    """The same nesting but for its masks, built anew."""
    for operation in operations:
        if operation != "mask":
            distribution = applied(operation, distribution)
    return distribution


def masks_inside_an_event(operations):
    """Whether single elements of one event are masked. What is inside a transform is no mask of the whole."""
    transforms = [i for i, operation in enumerate(operations) if operation in ("exp", "affine")]
    own = operations[transforms[-1] + 1 :] if transforms else operations
    return "mask" in own and "event" in own[own.index("mask") :]


def is_positive(support):
    """Whether a constraint lets positive values pass, whatever the shape."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support == constraints.positive
