# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Long elementwise formulas a part of the elements at a time, so that each step stays in the processor's cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_radial._pyro.compat import is_traced

__all__ = ["by_chunks"]


def by_chunks(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], size: int) -> Tensor:
    """An elementwise function, without gradients, of tensors of one shape.

    :param function: from tensors of one shape to a tensor of that shape, or with further dimensions in front.
    :param tensors: of one shape.
    :param int size: elements at a time.

    Example::

        >>> by_chunks(torch.add, (torch.ones(2, 3), torch.ones(2, 3)), 4)
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    shape = tensors[0].shape
    # A device other than the processor, and a compiler, have ways of their own.
    if is_traced() or tensors[0].device.type != "cpu" or tensors[0].numel() <= size:
        return function(*tensors)
    parts = [function(*part) for part in zip(*(tensor.flatten().split(size) for tensor in tensors), strict=True)]
    joined = torch.cat(parts, -1)
    return joined.reshape(joined.shape[:-1] + shape)
