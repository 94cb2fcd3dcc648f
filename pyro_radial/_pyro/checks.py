# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of arguments, and the state of any object that has one."""

import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch

Checked = TypeVar("Checked")
# The packages whose frames may stand between a warning and the line of the user.
BETWEEN = {"pyro_radial", "pyro", "torch", "sklearn", "contextlib"}


def check_shape(argument: str, value: Any, smaller: torch.Size = torch.Size()) -> torch.Size:
    """Return the value as a torch.Size, or raise a ValueError naming the argument if ``smaller`` does not fit."""
    with suppress(TypeError, RuntimeError):
        shape = torch.Size(value)
        if min(shape, default=0) >= 0 and torch.broadcast_shapes(smaller, shape) == shape:
            return shape
    raise ValueError(f"{argument} must be a shape that {tuple(smaller)} expands to, got {value!r}")


def joint_shape(owner: str, /, **shapes: object) -> torch.Size:
    """Return the shape that several broadcast to, or raise a ValueError naming the owner and the arguments."""
    sizes = [check_shape(f"{owner}: {argument}", shape) for argument, shape in shapes.items()]
    try:
        return torch.broadcast_shapes(*sizes)
    except RuntimeError:
        got = " and ".join(str(tuple(size)) for size in sizes)
        raise ValueError(
            f"{owner}: {' and '.join(shapes)} must have shapes that broadcast, got {got}"
        ) from None


def check_choice(argument: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a ValueError naming the argument if the value is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{argument} must be one of {choices}, got {value!r}")


def optional(check: Callable[[str, Any], Checked], argument: str, value: object) -> Checked | None:
    """Return None, or the value as a check returns it."""
    return None if value is None else check(argument, value)


def check_types(kind: type, /, **arguments: object) -> None:
    """Raise a ValueError naming the first argument that is not of this type."""
    for argument, value in arguments.items():
        if not isinstance(value, kind):
            got = f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)
            raise ValueError(f"{argument} must be a {kind.__name__}, got {got}")


def kind_of(value: object) -> str:
    """Return the class of a value; of a NumPy array, or a table of pandas or polars, also how to make it a tensor."""
    table = ", whose to_numpy() is an array" if hasattr(value, "to_numpy") else ""
    return type(value).__name__ + (
        ", which torch.as_tensor converts" if isinstance(value, np.ndarray) else table
    )


def check_number(
    argument: str, value: Any, is_valid: Callable[[Any], Any], requirement: str
) -> float:
    """Return the value as a float, or raise a ValueError naming the argument if it is not a number that fits."""
    with suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, bool | str) and is_valid(value):
            return float(value)
    raise ValueError(f"{argument} must be {requirement}, got {value!r}")


#: Return the value as a float, or raise a ValueError naming the argument if it is not positive and finite.
positive_float = partial(
    check_number,
    is_valid=lambda number: 0.0 < number < math.inf,
    requirement="a positive finite number",
)
#: Return the value as a float, or raise a ValueError naming the argument if it is negative or not finite.
non_negative_float = partial(
    check_number,
    is_valid=lambda number: 0.0 <= number < math.inf,
    requirement="a finite number, at least zero",
)
#: Return the value as a float, or raise a ValueError naming the argument if it is not between zero and one.
proper_fraction = partial(
    check_number, is_valid=lambda number: 0.0 < number < 1.0, requirement="between zero and one"
)


def held_numbers(argument: str, value: object, **like: Any) -> torch.Tensor:
    """Return numbers as a tensor, by default in float64, or raise a ValueError naming the argument if it holds none."""
    try:
        return torch.as_tensor(value, **(like or {"dtype": torch.float64}))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{argument} must hold numbers, got {value!r}") from error


def check_integer(argument: str, value: Any, least: int, requirement: str) -> int:
    """Return the value as an int, or raise a ValueError naming the argument if it is no integer or less than that."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{argument} must be {requirement}, got {value!r}")
    return number


#: Return the value as an int, or raise a ValueError naming the argument unless it is an integer above zero.
positive_count = partial(check_integer, least=1, requirement="a positive integer")
#: Return the value as an int, or raise a ValueError naming the argument unless it is an integer from zero on.
non_negative_integer = partial(check_integer, least=0, requirement="a non-negative integer")


def random_seed(argument: str, value: object, bits: int = 32) -> int:
    """Return the value as an int, or raise a ValueError naming the argument unless it is a seed (NumPy: 32 bits)."""
    number = non_negative_integer(argument, value)
    if number >= 2**bits:
        raise ValueError(f"{argument} must be less than 2**{bits}, got {value!r}")
    return number


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Put a prefix, such as the name of a task, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from error


def has_state(holder: object) -> bool:
    """Return whether an object has the methods of a module to return and load its state, or its extra state."""
    return bool(_state_methods(holder))


def states(holders: Mapping[str, object]) -> dict[str, Any]:
    """Return the states of the objects that have one, by name."""
    return {
        name: _state_methods(holder)[0]() for name, holder in holders.items() if has_state(holder)
    }


def load_states(holders: Mapping[str, object], saved: Mapping[str, object]) -> None:
    """Load the states that :func:`states` returned; raise a ValueError before that if an object has no state."""
    for name in saved:
        if not has_state(holders.get(name)):
            kind = type(holders.get(name)).__name__
            raise ValueError(
                f"{name} must have load_state_dict, because its state was saved, got {kind}"
            )
    for name, state in saved.items():
        _state_methods(holders[name])[1](state)


def _state_methods(holder: object) -> list[Any]:
    """Return the methods that get and load the state of an object; an empty list for a class or without a state."""
    if isinstance(holder, type):
        return []
    for pair in (("state_dict", "load_state_dict"), ("get_extra_state", "set_extra_state")):
        if all(hasattr(holder, name) for name in pair):
            return [getattr(holder, name) for name in pair]
    return []


def warn(text: str) -> None:
    """Warn at the user's line: the first one on the stack outside of this library, Pyro and torch."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in BETWEEN:
            break
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
