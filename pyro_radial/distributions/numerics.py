# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Numbers and sums that the distributions and their divergences share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyro_radial._pyro.checks import check_shape
from pyro_radial._pyro.compat import is_traced

# E log|r| for r ~ N(0, 1): -(Euler's constant + log 2) / 2.
MEAN_LOG_HALF_NORMAL = -0.5 * (0.57721566490153286061 + math.log(2.0))
# At most this many numbers are summed in their own dtype.
_SHORT_ROW = 64


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over an event: float64, where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def to_accumulation_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor in the accumulation dtype."""
    return tensor.to(accumulation_dtype(tensor))


def event_sum(tensor: Tensor, event_dim: int) -> Tensor:
    """Sum over the last dimensions, with a result in the accumulation dtype."""
    dims = tuple(range(-event_dim, 0))
    return (
        tensor.sum(dims, dtype=accumulation_dtype(tensor))
        if dims
        else to_accumulation_dtype(tensor)
    )


def event_norm(tensor: Tensor, event_dim: int) -> Tensor:
    """Return the norm over the last dimensions in the accumulation dtype; float32 is off by 1e-3 for D = 1e7."""
    dims = tuple(range(-event_dim, 0))
    return torch.linalg.vector_norm(tensor, dim=dims, dtype=accumulation_dtype(tensor))


def append_dims(tensor: Tensor, num_dims: int) -> Tensor:
    """Return the tensor with so many last dimensions of size one added."""
    return tensor.reshape(tensor.shape + (1,) * num_dims)


def row_sum(tensor: Tensor) -> Tensor:
    """Sum over the last dimension, with a result in the accumulation dtype."""
    sums = accumulation_dtype(tensor)
    if tensor.dtype == torch.float32 and tensor.shape[-1] <= _SHORT_ROW:
        # A product in float32 adds short rows several times faster, and costs a rounding or two.
        return (tensor @ tensor.new_ones(tensor.shape[-1])).to(sums)
    return tensor.sum(-1, dtype=sums)


def by_chunks(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], size: int) -> Tensor:
    """Apply an elementwise function, without gradients, to ``size`` elements at a time.

    Each step of a long formula then stays in the processor's cache.
    """
    # Other devices and compilers have their own ways.
    if is_traced() or tensors[0].device.type != "cpu" or tensors[0].numel() <= size:
        return function(*tensors)
    split = [tensor.flatten().split(size) for tensor in tensors]
    joined = torch.cat([function(*chunk) for chunk in zip(*split, strict=True)], -1)
    return joined.reshape(joined.shape[:-1] + tensors[0].shape)


def begin_expand(
    distribution: TorchDistribution, cls: type, batch_shape: Sequence[int], instance: object
) -> Any:
    """Return an instance of a class with this batch shape and no parameters yet, for its ``expand`` to fill."""
    expanded = distribution._get_checked_instance(cls, instance)
    shape = check_shape("batch_shape", batch_shape, distribution.batch_shape)
    TorchDistribution.__init__(expanded, shape, distribution.event_shape, validate_args=False)
    expanded._validate_args = distribution._validate_args
    return expanded


def check_float(distribution: str, name: str, argument: object) -> None:
    """Raise a ValueError if the argument is a tensor of whole numbers, flags or complex numbers."""
    if isinstance(argument, Tensor) and not argument.is_floating_point():
        raise ValueError(
            f"{distribution}: {name} must be a floating-point tensor, got {argument.dtype}"
        )


def log_sphere_area(dim: int) -> float:
    r"""Return the log-area of the unit sphere in :math:`R^n`: :math:`\log 2 + \frac n2 \log\pi - \log\Gamma(n/2)`."""
    return math.log(2.0) + 0.5 * dim * math.log(math.pi) - math.lgamma(0.5 * dim)
