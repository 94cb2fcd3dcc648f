# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The device, dtype, modes, buffers and precision of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper

import torch
from torch import Tensor, nn

from pyro_radial._pyro.types import Model
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of, submodules


def device_of(*modules: object) -> torch.device:
    """Return the device of the first network in the modules, else of the first that has any parameters or buffers."""
    networks = modules_of(BayesianModule, *modules)
    if networks:
        return networks[0].device
    tensor = next(_tensors_of(modules), None)
    return torch.device("cpu") if tensor is None else tensor.device


def dtype_of(*modules: object) -> torch.dtype:
    """Return the dtype of the first module that has any floating-point parameters or buffers, else torch's default."""
    for tensor in _tensors_of(modules):
        if tensor.is_floating_point():
            return tensor.dtype
    networks = modules_of(BayesianModule, *modules)
    return networks[0].dtype if networks else torch.get_default_dtype()


def _tensors_of(modules: tuple[object, ...]) -> Iterator[Tensor]:
    for module in modules:
        if isinstance(module, nn.Module):
            yield from (*module.parameters(), *module.buffers())


@contextmanager
def evaluating(*modules: object) -> Iterator[None]:
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


@contextmanager
def keeping_buffers(*modules: object) -> Iterator[None]:
    """Restore all buffers afterwards, such as the running statistics of batch norm."""
    saved_buffers = []
    for module in submodules(*modules):
        for name, buffer in module.named_buffers(recurse=False):
            if not nn.parameter.is_lazy(buffer):
                saved_buffers.append((module, name, buffer, buffer.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved_buffers:
                setattr(module, name, buffer.copy_(value))


class Autocast:
    """Run a model under ``torch.autocast``; densities and KLs of its sites are computed later, in full precision."""

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.dtype = dtype
        self.device = device
        update_wrapper(self, getattr(model, "forward", model))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the model."""
        with torch.autocast(self.device.type, self.dtype):
            return self.model(*args, **kwargs)
