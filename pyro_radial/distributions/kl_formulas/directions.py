# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The directions over which a KL to a radial distribution is averaged: how many, and which."""

import math

import torch
from pyro import settings
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.distributions.fixed_noise import fixed_noise
from pyro_radial.distributions.special import accumulation_dtype

__all__ = ["combine", "directions", "num_directions", "project"]

# Directions, and how many numbers to draw at least: a small event is noisier, and cheap; in a batch of them the noise
# averages out. By benchmarks/distributions/radial_kl.py it is then below 1 % of max(KL, 100 nats) in every case
# measured there.
NUM_DIRECTIONS = 2
_LEAST_DRAWS = 1000
# Fixed, so that a KL is a function of its parameters; None draws fresh directions from torch's global generator.
DIRECTION_SEED: int | None = 0
# Added to the seed: a user's own seed is often 0 too, and means drawn with it would lie along the directions.
_STREAM = 0x5851F42D
# So many weighted directions are added one by one.
_FEW = 8


@settings.register("radial_kl_directions", __name__, "NUM_DIRECTIONS")
def _check_directions(value: int) -> None:
    positive_count("radial_kl_directions", value)


@settings.register("radial_kl_seed", __name__, "DIRECTION_SEED")
def _check_seed(value: int | None) -> None:
    if isinstance(value, bool) or not (value is None or isinstance(value, int)):
        raise ValueError(f"radial_kl_seed must be an integer, or None for fresh directions, got {value!r}")


def num_directions(num_elements: int) -> int:
    """How many directions a mean is taken over, for a batch of events with so many elements in all."""
    return max(NUM_DIRECTIONS, math.ceil(_LEAST_DRAWS / max(num_elements, 1)))


def directions(like: Tensor) -> Tensor:
    """Standard normal noise along each direction, ``[*batch, directions, D]``.

    :param Tensor like: of the events' shape, ``[*batch, D]``, dtype and device.

    Example::

        >>> directions(torch.ones(3, 600)).shape
        torch.Size([3, 2, 600])
    """
    shape = (*like.shape[:-1], num_directions(like.numel()), like.shape[-1])
    if DIRECTION_SEED is None:
        return torch.randn(shape, dtype=like.dtype, device=like.device)
    return fixed_noise(shape, (DIRECTION_SEED + _STREAM) % 2**63, like)


def project(directions: Tensor, vector: Tensor) -> Tensor:
    """The inner product with each direction, in the accumulation dtype.

    :param Tensor directions: ``[*batch, directions, D]``.
    :param Tensor vector: ``[*batch, D]``.
    :returns: ``[directions, *batch]``: along the last dimension every step of a formula is fast.

    Example::

        >>> project(torch.eye(2), torch.tensor([3.0, 4.0]))
        tensor([3., 4.], dtype=torch.float64)
    """
    products = (directions @ vector.unsqueeze(-1)).squeeze(-1)
    return products.movedim(-1, 0).contiguous().to(accumulation_dtype(products))


def combine(weights: Tensor, directions: Tensor) -> Tensor:
    """The weighted sum of the directions, ``[*batch, D]``.

    :param Tensor weights: ``[directions, *batch, 1]``.
    :param Tensor directions: ``[*batch, directions, D]``.

    Example::

        >>> combine(torch.tensor([[3.0], [4.0]]), torch.eye(2))
        tensor([3., 4.])
    """
    if len(weights) > _FEW:
        return (weights.squeeze(-1).movedim(0, -1).unsqueeze(-2) @ directions).squeeze(-2)
    # A product of matrices is slow where these are small.
    first, *rest = zip(weights.unbind(0), directions.unbind(-2), strict=True)
    return sum((weight * direction for weight, direction in rest), first[0] * first[1])
