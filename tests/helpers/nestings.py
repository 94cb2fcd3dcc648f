# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Ways to wrap a distribution: events, expansion, masks and two transforms, up to three, each pair in each place."""

from itertools import product

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch.distributions.transforms import AffineTransform, ExpTransform

from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.distributions.wrappers import expand_copy

EXP, AFFINE = ExpTransform(), AffineTransform(0.5, 2.0)
OPERATIONS = ("event", "expand", "mask", "exp", "affine")


def mask_for(distribution):
    """A mask that hides every other element of the batch."""
    shape = distribution.batch_shape
    return (torch.arange(max(1, shape.numel())) % 2 == 0)[: shape.numel()].reshape(shape)


def applied(operation, distribution):
    """The distribution wrapped once more, or None where that makes no sense."""
    if operation == "event":
        return distribution.to_event(1) if distribution.batch_shape else None
    if operation == "expand":
        return expand_copy(distribution, (2, *distribution.batch_shape))
    if operation == "mask":
        return distribution.mask(mask_for(distribution))
    if operation == "exp" and not is_real(distribution.support):
        return None
    # On the sphere neither makes sense; an affine map of positive values is on the whole line for torch.
    if is_on_sphere(distribution.support):
        return None
    return dist.TransformedDistribution(distribution, [EXP if operation == "exp" else AFFINE])


def sequences():
    """Every sequence of up to two operations, and of three so many that each first meets each last one.

    A sequence of three comes with its alternatives in the middle, of which the first that makes sense counts.
    """
    for depth in (0, 1, 2):
        for operations in product(OPERATIONS, repeat=depth):
            yield [operations]
    for (i, first), (j, last) in product(enumerate(OPERATIONS), repeat=2):
        # Rotated, so that the middle ones meet all others too.
        middles = [OPERATIONS[(i + j + shift) % len(OPERATIONS)] for shift in range(len(OPERATIONS))]
        yield [(first, middle, last) for middle in middles]


def nestings(distribution):
    """``(operations, wrapped distribution)`` for every sequence of operations that makes sense, the empty one first."""
    for alternatives in sequences():
        wrapped = {operations: wrap(operations, distribution) for operations in alternatives}
        yield from [item for item in wrapped.items() if item[1] is not None][:1]


def wrap(operations, distribution):
    """The distribution after these operations, or None where one of them makes no sense."""
    for operation in operations:
        distribution = None if distribution is None else applied(operation, distribution)
    return distribution


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
