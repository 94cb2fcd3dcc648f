# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Whether what is asked for fits into memory."""

import math
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["allocate", "free_memory", "require_memory"]


def allocate(who: str, num_samples: int, num_points: int, values: Tensor) -> Tensor:
    """Room for all draws at all inputs.

    :param str who: what the error calls the caller.
    :param int num_samples: S, the number of draws.
    :param int num_points: N, the number of inputs.
    :param torch.Tensor values: of one draw at some inputs, ``[n, ...]``.
    :returns: an empty tensor ``[S, N, ...]``.
    :raises MemoryError: with the estimate.
    """
    shape = (num_samples, num_points, *values.shape[1:])
    what = f"{who}: {num_samples} draws at {num_points} inputs, {list(shape)},"
    require_memory(what, math.prod(shape) * values.element_size(), values.device)
    return values.new_empty(shape)


def require_memory(what: str, needed: int, device: torch.device) -> None:
    """Refuse what would not fit into free memory.

    :param str what: the subject of the message.
    :param int needed: bytes.
    :raises MemoryError: with the estimate.
    """
    free = free_memory(device)
    if free is not None and needed > free:
        raise MemoryError(
            f"{what} need {needed / 2**30:.1f} GiB on {device}, where {free / 2**30:.1f} GiB are free; ask for fewer "
            "draws or fewer inputs at a time"
        )


def free_memory(device: torch.device) -> int | None:
    """The memory that can be allocated on a device.

    :returns: bytes, or None where the system does not say.
    """
    if device.type == "cuda":
        # What torch has reserved and does not use is free for torch, although not for others.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kibibytes[0] * 1024 if kibibytes else None
