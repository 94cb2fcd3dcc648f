# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The device, dtype, modes and precision of modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial.nn.bayesian_module import BayesianModule, submodules


def device_of(*modules: Any) -> torch.device:
    """The device of the first network in the modules, else of the first that has any parameters or buffers."""
    network = next(_networks(modules), None)
    if network is not None:
        return network.device
    tensor = next(_tensors_of(modules), None)
    return torch.device("cpu") if tensor is None else tensor.device


def dtype_of(*modules: Any) -> torch.dtype:
    """The dtype of the first module that has any floating-point parameters or buffers, else torch's default."""
    tensor = next((tensor for tensor in _tensors_of(modules) if tensor.is_floating_point()), None)
    if tensor is not None:
        return tensor.dtype
    return next((part.dtype for part in _networks(modules)), torch.get_default_dtype())


def _tensors_of(modules: Any) -> Iterator[Tensor]:
    for module in modules:
        if isinstance(module, nn.Module):
            yield from (*module.parameters(), *module.buffers())


def _networks(modules: Any) -> Iterator[BayesianModule]:
    return (part for part in submodules(*modules) if isinstance(part, BayesianModule))


@contextmanager
def evaluating(*modules: Any) -> Iterator[None]:
    """Put modules in evaluation mode, and restore the mode of each submodule afterwards."""
    modes = [(module, module.training) for module in submodules(*modules)]
    for module in modules:
        if isinstance(module, nn.Module):
            module.eval()
    try:
        yield
    finally:
        # Parents come before children, so that a child whose own mode differs is restored last.
        for module, training in modes:
            if module.training != training:
                module.train(training)


class Autocast:
    """Run a model under ``torch.autocast``; densities and KLs of its sites are computed later, in full precision."""

    def __init__(self, model: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        update_wrapper(self, getattr(model, "forward", model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the model."""
        with torch.autocast(self.device.type, self.dtype):
            return self.model(*args, **kwargs)
