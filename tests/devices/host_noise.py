# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A GPU that draws the CPU's random numbers, so that its results must equal the CPU's."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class HostGenerator(torch._C.Generator):
    """Torch's generator, and the CPU's where a GPU's is asked for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator.__new__(torch._C.Generator, "cpu")


class HostNoise(TorchDispatchMode):
    """Draws on the CPU whatever would be drawn on a GPU, and copies it there."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        asked = kwargs.get("device")
        on_gpu = any(tensor.is_cuda for tensor in tensors) or (asked is not None and torch.device(asked).type == "cuda")
        if not on_gpu or torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*args, **kwargs)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        host_args, host_kwargs = pytree.tree_map_only(Tensor, Tensor.cpu, (args, kwargs))
        found = op(*host_args, **host_kwargs)
        if op.overloadpacket.__name__.endswith("_"):
            return args[0].copy_(found)
        return pytree.tree_map_only(Tensor, Tensor.cuda, found)


def start() -> None:
    """Let all generators be the CPU's, and let products be as exact as the CPU's."""
    torch.Generator = HostGenerator  # type: ignore[misc]
    torch.backends.cudnn.allow_tf32 = False
