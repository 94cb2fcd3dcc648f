# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The arguments of a program: their leaves, what of them decides on a graph, and the numbers that are its inputs."""

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_radial._pyro.compat import tree_flatten, tree_map, tree_unflatten
from pyro_radial._pyro.types import Args, Kwargs
from pyro_radial.infer.step.program_state import PLAIN, UnrecordableError, metadata_of

# Leaves that are compared by their values.
COMPARED = (*PLAIN, range, type, Enum)


class Opened(NamedTuple):
    """A dataclass with its fields, which torch's trees see."""

    kind: type
    fields: dict[str, object]


class Leaves(NamedTuple):
    """The leaves of a program's arguments, and a name of their tree."""

    values: Sequence[Any]
    tree: Hashable

    @classmethod
    def of(cls, args: Args, kwargs: Kwargs) -> "Leaves":
        """Find the leaves of arguments."""
        if not kwargs and all(isinstance(argument, Tensor) for argument in args):
            return cls(args, len(args))
        values, tree = tree_flatten((args, dict(kwargs)))
        if any(map(is_dataclass, values)):
            values, tree = tree_flatten(_open((args, dict(kwargs))))
        # Trees have no hash in older versions of torch.
        return cls(values, repr(tree))

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the leaves."""
        return [value for value in self.values if isinstance(value, Tensor)]


def rebuilder(args: Args, kwargs: Kwargs) -> Callable[[Sequence[Any]], tuple[Args, Kwargs]]:
    """Return a function that puts other leaves into the tree of arguments."""
    _, tree = tree_flatten(_open((args, dict(kwargs))))

    def rebuild(values: Sequence[Any]) -> tuple[Args, Kwargs]:
        arguments: tuple[Args, Kwargs] = _close(tree_unflatten(values, tree))
        return arguments

    return rebuild


@dataclass
class Numbers:
    """The numbers of a program that are inputs of its graphs: those that had two values.

    A number is known by its position among the leaves, or by its path in the state that the program reads.
    """

    positions: set[int] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    #: Numbers that Python reads, as in ``if number > 0`` or ``range(number)``, so each value has a graph of its own.
    read: set[int | str] = field(default_factory=set)
    #: The first value of each number among the leaves, by position.
    _first_values: dict[int, object] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.positions or self.paths)

    def notice(self, values: Sequence[object]) -> bool:
        """Return whether leaves have a number with a second value, which is an input from now on."""
        num_positions = len(self.positions)
        for position, value in enumerate(values):
            if is_number(value):
                first_value = self._first_values.setdefault(position, value)
                if (
                    first_value != value
                    and type(first_value) is type(value)
                    and position not in self.read
                ):
                    self.positions.add(position)
        return len(self.positions) > num_positions

    def notice_paths(self, paths: Collection[str]) -> bool:
        """Return whether there are new ones among the paths of numbers that have changed."""
        num_paths = len(self.paths)
        self.paths.update(path for path in paths if path not in self.read)
        return len(self.paths) > num_paths

    def give_up(self, read: Collection[int | str]) -> None:
        """Note numbers that Python reads."""
        self.read.update(read)
        self.positions -= self.read
        self.paths -= self.read

    def give_up_all(self) -> None:
        """Let each value of every number have a graph of its own."""
        self.give_up([*self.positions, *self.paths])


def is_number(value: object) -> bool:
    """Return whether a value is a Python number that can be an input of a graph."""
    return type(value) in (int, float)


def as_tensor_of(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a 0-d tensor, which does not change the dtype of results."""
    return torch.tensor(value, dtype=dtype if type(value) is float else None, device=device)


def description(value: object) -> Hashable:
    """Return what decides on a graph about a leaf.

    :raises UnrecordableError: if no graph can take it.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise UnrecordableError(
                f"an argument of shape {tuple(value.shape)} requires a gradient, which a graph cannot take"
            )
        if value.layout is not torch.strided:
            raise UnrecordableError(
                f"an argument of shape {tuple(value.shape)} is sparse, which a graph cannot take"
            )
        return metadata_of(value)
    if isinstance(value, COMPARED):
        return type(value), value
    if isinstance(value, slice):
        bounds = value.start, value.stop, value.step
        if all(isinstance(bound, int | None) for bound in bounds):
            return slice, *bounds
    raise UnrecordableError(
        "its arguments must be tensors, numbers, strings, None, slices, and tuples, lists, dicts and dataclasses of "
        f"these, got {type(value).__name__}"
    )


def descriptions(values: Sequence[object], positions: Collection[int]) -> tuple[Hashable, ...]:
    """Return what decides on a graph about leaves, with numbers at some positions as its inputs."""
    if not positions:
        return tuple(map(description, values))
    described: list[Hashable] = []
    for position, value in enumerate(values):
        is_input = position in positions and is_number(value)
        described.append(type(value).__name__ if is_input else description(value))
    return tuple(described)


def kinds(values: Sequence[object]) -> tuple[Hashable, ...]:
    """Return what decides on whether a program can be recorded: not the shapes of tensors and the values of numbers."""
    described: list[Hashable] = []
    for value in values:
        if isinstance(value, Tensor):
            described.append((value.dtype, value.device))
        else:
            described.append(type(value).__name__ if is_number(value) else description(value))
    return tuple(described)


def has_nan(values: Sequence[object]) -> bool:
    """Return whether a Python number is NaN, which differs from itself."""
    return any(type(value) is float and math.isnan(value) for value in values)


def _open(tree: object) -> Any:
    """Replace the dataclasses in a tree by :class:`Opened` ones."""

    def open_leaf(value: object) -> object:
        if not is_dataclass(value) or isinstance(value, type):
            return value
        return Opened(type(value), {f.name: _open(getattr(value, f.name)) for f in fields(value)})

    return tree_map(open_leaf, tree)


def _close(tree: object) -> Any:
    """Put the dataclasses back."""

    def close_leaf(value: object) -> object:
        if not isinstance(value, Opened):
            return value
        instance: object = object.__new__(value.kind)
        for name, entry in value.fields.items():
            object.__setattr__(instance, name, _close(entry))
        return instance

    return tree_map(close_leaf, tree, is_leaf=lambda value: isinstance(value, Opened))
