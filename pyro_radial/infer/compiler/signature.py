# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Describe the arguments of a call: which leaves they have, and which properties of these a graph fixes."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_radial._pyro.compat import tree_flatten, tree_map, tree_unflatten
from pyro_radial._pyro.types import Args, Kwargs
from pyro_radial.infer.compiler.state import PLAIN, Refused, metadata_of

# Larger integers are not inputs of a graph: a float64 would round them.
MOST_INTEGER = 2**53
# Types of leaves whose values a graph fixes.
COMPARED = (*PLAIN, range, type, Enum)


class OpenedDataclass(NamedTuple):
    """A dataclass as a named tuple, whose fields torch's trees can flatten."""

    kind: type
    fields: dict[str, object]


class Leaves(NamedTuple):
    """The leaves of a program's arguments, and a key of the structure of the arguments."""

    values: Sequence[Any]
    tree: Hashable

    @classmethod
    def of(cls, args: Args, kwargs: Kwargs) -> "Leaves":
        """Return the leaves of arguments."""
        if not kwargs and all(isinstance(argument, Tensor) for argument in args):
            return cls(args, len(args))
        values, tree = tree_flatten((args, dict(kwargs)))
        if any(map(is_dataclass, values)):
            values, tree = tree_flatten(_open_dataclasses((args, dict(kwargs))))
        # Trees have no hash in older versions of torch.
        return cls(values, repr(tree))

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the leaves."""
        return [value for value in self.values if isinstance(value, Tensor)]


def rebuilder(args: Args, kwargs: Kwargs) -> Callable[[Sequence[Any]], tuple[Args, Kwargs]]:
    """Return a function that makes arguments of the same structure from other leaves."""
    _, tree = tree_flatten(_open_dataclasses((args, dict(kwargs))))
    return lambda values: _close_dataclasses(tree_unflatten(values, tree))


@dataclass
class Numbers:
    """The Python numbers of a program that are inputs of its graphs, because they had a second value.

    A number has a position among the leaves of the arguments, or a path in the state that the program reads.
    """

    positions: set[int] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    #: Numbers that Python reads, as in ``if number > 0`` or ``range(number)``, so each value has a separate graph.
    read_by_python: set[int | str] = field(default_factory=set)
    #: The first value of each number among the leaves, by position.
    _first_values: dict[int, object] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.positions or self.paths)

    def notice_values(self, values: Sequence[object]) -> bool:
        """Make the numbers among leaves that have a second value inputs; return whether there are any."""
        num_positions = len(self.positions)
        for position, value in enumerate(values):
            if is_number(value):
                first_value = self._first_values.setdefault(position, value)
                if (
                    first_value != value
                    and type(first_value) is type(value)
                    and position not in self.read_by_python
                ):
                    self.positions.add(position)
        return len(self.positions) > num_positions

    def notice_paths(self, paths: Collection[str]) -> bool:
        """Make the numbers of the state at these paths inputs; return whether any was not one before."""
        num_paths = len(self.paths)
        self.paths.update(path for path in paths if path not in self.read_by_python)
        return len(self.paths) > num_paths

    def exclude(self, origins: Collection[int | str]) -> None:
        """Make numbers that Python reads inputs no longer; each of their values has a separate graph from now on."""
        self.read_by_python.update(origins)
        self.positions -= self.read_by_python
        self.paths -= self.read_by_python

    def exclude_all(self) -> None:
        """Make no number an input; each value of every number has a separate graph from now on."""
        self.exclude([*self.positions, *self.paths])


def is_number(value: object) -> bool:
    """Return whether a value is a Python number that can be an input of a graph, as a float64 or an int64."""
    return type(value) is float or (type(value) is int and abs(value) < MOST_INTEGER)


def number_tensor(number: float, device: torch.device) -> Tensor:
    """Return a Python number as a 0-d tensor with the same value."""
    dtype = torch.float64 if type(number) is float else torch.int64
    return torch.tensor(number, dtype=dtype, device=device)


def description(value: object) -> Hashable:
    """Return the properties of a leaf that a graph fixes: those of a tensor, or the value of another leaf.

    :raises Refused: if a graph cannot take the leaf.
    """
    content = _description_of_content(value)
    attributes = None if isinstance(value, (type, Enum)) else getattr(value, "__dict__", None)
    if not attributes:
        return content
    for name, attribute in attributes.items():
        if not isinstance(attribute, PLAIN):
            raise Refused(
                f"an argument has the attribute {name}, of type {type(attribute).__name__}, which a graph cannot take; "
                "pass it as an argument of its own"
            )
    return content, *attributes.items()


def _description_of_content(value: object) -> Hashable:
    """Return the properties of a leaf without attributes that were set on it."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise Refused(
                f"an argument of shape {tuple(value.shape)} requires a gradient, which a graph cannot take"
            )
        if value.layout is not torch.strided:
            raise Refused(
                f"an argument of shape {tuple(value.shape)} is sparse, which a graph cannot take"
            )
        return metadata_of(value)
    if isinstance(value, COMPARED):
        return type(value), value
    if isinstance(value, slice):
        bounds = value.start, value.stop, value.step
        if all(isinstance(bound, int | None) for bound in bounds):
            return slice, *bounds
    raise Refused(
        "its arguments must be tensors, numbers, strings, None, slices, and tuples, lists, dicts and dataclasses of "
        f"these, got {type(value).__name__}"
    )


def descriptions(values: Sequence[object], positions: Collection[int]) -> tuple[Hashable, ...]:
    """Return the description of each leaf; for numbers at these positions, which are inputs, only the type."""
    described: list[Hashable] = []
    for position, value in enumerate(values):
        is_input = position in positions and is_number(value)
        described.append(type(value).__name__ if is_input else description(value))
    return tuple(described)


def kinds(values: Sequence[object]) -> tuple[Hashable, ...]:
    """Return the description of each leaf without shapes of tensors and values of numbers.

    Only these properties decide whether a program can be recorded.
    """
    described: list[Hashable] = []
    for value in values:
        if isinstance(value, Tensor):
            described.append((value.dtype, value.device))
        else:
            described.append(type(value).__name__ if is_number(value) else description(value))
    return tuple(described)


def _open_dataclasses(tree: object) -> Any:
    """Replace the dataclasses in a tree by :class:`OpenedDataclass`."""

    def open_leaf(value: object) -> object:
        if not is_dataclass(value) or isinstance(value, type):
            return value
        entries = {f.name: getattr(value, f.name) for f in fields(value)}
        # Those set on the instance need not be fields.
        entries.update(getattr(value, "__dict__", {}))
        return OpenedDataclass(
            type(value), {name: _open_dataclasses(entry) for name, entry in entries.items()}
        )

    return tree_map(open_leaf, tree)


def _close_dataclasses(tree: object) -> Any:
    """Replace each :class:`OpenedDataclass` in a tree by its dataclass."""

    def close_leaf(value: object) -> object:
        if not isinstance(value, OpenedDataclass):
            return value
        instance: object = object.__new__(value.kind)
        for name, entry in value.fields.items():
            object.__setattr__(instance, name, _close_dataclasses(entry))
        return instance

    return tree_map(close_leaf, tree, is_leaf=lambda value: isinstance(value, OpenedDataclass))
