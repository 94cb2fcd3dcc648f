# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Buffers of a model that a run of it must not change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pyro_radial.nn.bayesian_module import submodules

__all__ = ["keeping_buffers"]


@contextmanager
def keeping_buffers(*modules: Any) -> Iterator[None]:
    """Buffers, such as the running statistics of batch norm, as they were before, whatever is run meanwhile."""
    owned = [(module, name, b) for module in submodules(*modules) for name, b in module.named_buffers(recurse=False)]
    kept = [(module, name, b, b.clone()) for module, name, b in owned if not is_lazy(b)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                setattr(module, name, buffer.copy_(value))
