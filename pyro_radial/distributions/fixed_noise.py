# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Normal noise of a seed of its own: a constant, also to ``vmap`` and to a compiler."""

import torch
from torch import Tensor

__all__ = ["fixed_noise"]


# An operator of its own, since neither a compiler nor vmap lets a generator pass.
@torch.library.custom_op("pyro_radial::fixed_noise", mutates_args=())
def _fixed_noise(shape: list[int], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), dtype=dtype, device=device, generator=generator)


@_fixed_noise.register_fake
def _(shape: list[int], seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def fixed_noise(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Standard normal noise in the dtype and on the device of ``like``, always the same for a seed and a shape.

    Under ``vmap`` all examples have the same. The global generators are left alone.

    Example::

        >>> torch.equal(fixed_noise((3,), 0, torch.zeros(())), fixed_noise((3,), 0, torch.ones(())))
        True
    """
    noise: Tensor = _fixed_noise(list(shape), seed, like.dtype, like.device)
    return noise
