# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of inputs and targets: what training and prediction both need to know of data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from pyro_radial.nn.bayesian_module import BayesianModule, submodules

Inputs = Tensor | tuple[Tensor, ...]


class Rows:
    """Data as rows to take by index: inputs and targets in memory, or a map-style ``Dataset``.

    :param data: ``(x, y)``, where x is a tensor or a tuple of tensors, or a ``Dataset`` whose items are such pairs.
    :param str name: what errors call the data.
    :raises ValueError: for NaN in the tensors, lengths that differ, or no rows; of a ``Dataset``, once a row with NaN
        is taken.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.name = name
        if isinstance(data, IterableDataset):
            raise ValueError(f"{name} must be a map-style Dataset, with a length and items by index, not an iterable")
        self._dataset = data if isinstance(data, Dataset) else None
        if self._dataset is None:
            if not isinstance(data, tuple | list) or len(data) != 2:
                raise ValueError(
                    f"{name} must be a pair (x, y) of tensors or a torch Dataset, got {type(data).__name__}"
                )
            self._x, self._y = data
            check_inputs(self._x, f"{name}: x")
            check_inputs(self._y, f"{name}: y")
            if num_rows(self._x) != num_rows(self._y):
                raise ValueError(f"{name}: x has {num_rows(self._x)} rows and y has {num_rows(self._y)}")
        if len(self) == 0:
            raise ValueError(f"{name} has no rows")

    def __len__(self) -> int:
        return len(self._dataset) if self._dataset is not None else num_rows(self._x)  # type: ignore[arg-type]

    def take(self, index: Tensor) -> tuple[Inputs, Inputs]:
        """The inputs and targets of these rows."""
        if self._dataset is None:
            return take(self._x, index), take(self._y, index)
        items = [self._dataset[i] for i in index.tolist()]
        if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
            raise ValueError(
                f"{self.name}: an item of the Dataset must be a pair (x, y), got {type(items[0]).__name__}"
            )
        x, y = (tuple(part) if isinstance(part, list) else part for part in default_collate(items))
        check_inputs(x, f"{self.name}: x", index)
        check_inputs(y, f"{self.name}: y", index)
        return x, y

    def all(self) -> tuple[Inputs, Inputs]:
        """Every row, in order."""
        return self.take(torch.arange(len(self)))


def check_inputs(x: Any, name: str, index: Tensor | None = None) -> None:
    """Tensors of one length without NaN, or a ``ValueError`` that names the argument and the row.

    :param index: what the rows are called, where they are not all rows of their data.
    """
    tensors = x if isinstance(x, tuple) else (x,)
    if not tensors:
        raise ValueError(f"{name} is an empty tuple")
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise ValueError(f"{name} must be a tensor of rows or a tuple of such, got {type(tensor).__name__}")
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            rows = tensor.isnan().flatten(1).any(1) if tensor.dim() > 1 else tensor.isnan()
            first = int(rows.int().argmax())
            row = first if index is None else int(index[first])
            raise ValueError(f"{name} holds NaN in {int(rows.sum())} of {len(tensor)} rows, first in row {row}")
    if len({len(tensor) for tensor in tensors}) != 1:
        raise ValueError(f"{name}: its tensors have different numbers of rows")


def num_rows(x: Inputs) -> int:
    """The number of rows of a tensor or a tuple of tensors."""
    return len(x[0]) if isinstance(x, tuple) else len(x)


def take(x: Inputs, index: Tensor | slice) -> Any:
    """The rows of a tensor or a tuple of tensors."""
    return tuple(t[index] for t in x) if isinstance(x, tuple) else x[index]


def move(x: Inputs, device: torch.device) -> Any:
    """The rows on a device."""
    return tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)


def device_of(*modules: Any) -> torch.device:
    """The device of the first module that has any parameters."""
    for module in modules:
        if isinstance(module, nn.Module):
            for tensor in [*module.parameters(), *module.buffers()]:
                return tensor.device
    for module in submodules(*modules):
        # A network whose parameters are all random holds none, but knows where they started.
        if isinstance(module, BayesianModule):
            return module.device
    return torch.device("cpu")


@contextmanager
def evaluating(*modules: Any) -> Iterator[None]:
    """Modules in evaluation mode, each submodule's own mode restored afterwards."""
    modes = [(module, module.training) for module in submodules(*modules)]
    for module in modules:
        if isinstance(module, nn.Module):
            module.eval()
    try:
        yield
    finally:
        # Parents come before children, so that a child whose own mode differs is restored last.
        for module, training in modes:
            module.train(training)
