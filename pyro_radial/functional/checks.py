# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Points, function values and targets that do not fit, named."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["check_floating", "check_points", "check_targets", "check_values"]


def check_floating(argument: str, value: Any) -> None:
    """A tensor of floating-point numbers, or a ValueError that names the argument."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{argument} must be a tensor of floating-point numbers, got {_kind(value)}")


def check_points(x: Tensor) -> None:
    """Points ``[N, ...]``, or a ValueError that names ``x``."""
    check_floating("x", x)
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(f"x must be points of shape [N, D], got shape {list(x.shape)}")


def check_values(f: Tensor, x: Tensor) -> None:
    """Function values ``[S, N, O]`` at points x, or a ValueError that names the argument."""
    check_points(x)
    check_floating("f", f)
    if f.dim() != 3 or f.shape[1] != len(x) or f.numel() == 0:
        raise ValueError(f"f must be function values of shape [S, {len(x)}, O], got shape {list(f.shape)}")


def check_targets(y: Tensor, x: Tensor) -> Tensor:
    """Targets at points x, ``[N, O]`` in float64, or a ValueError that names the argument."""
    check_points(x)
    if not isinstance(y, Tensor) or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be a tensor of real numbers, got {_kind(y)}")
    if y.dim() not in (1, 2) or len(y) != len(x):
        raise ValueError(f"y must have shape [{len(x)}] or [{len(x)}, O], got {list(y.shape)}")
    if not bool(y.isfinite().all()):
        raise ValueError("y must be finite, got NaN or infinity")
    return y.double().reshape(len(y), -1)


def _kind(value: Any) -> Any:
    return getattr(value, "dtype", type(value).__name__)
