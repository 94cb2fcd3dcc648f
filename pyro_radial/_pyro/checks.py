# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of arguments, and the state of any object that has one."""

import math
import operator
from collections.abc import Mapping
from typing import Any

__all__ = [
    "check_flag",
    "has_state",
    "load_states",
    "non_negative_integer",
    "positive_count",
    "positive_float",
    "proper_fraction",
    "random_seed",
    "states",
]

STATE_METHODS = (("state_dict", "load_state_dict"), ("get_extra_state", "set_extra_state"))


def check_flag(argument: str, value: Any) -> bool:
    """The value, or a ValueError that names the argument if it is not True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{argument} must be True or False, got {value!r}")
    return value


def positive_float(argument: str, value: Any) -> float:
    """The value as a float, or a ValueError that names the argument if it is not positive and finite."""
    try:
        fits = not isinstance(value, bool) and bool(0.0 < value < math.inf)
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{argument} must be a positive finite number, got {value!r}")
    return float(value)


def positive_count(argument: str, value: Any) -> int:
    """The value as an int, or a ValueError that names the argument if it is not an integer of at least one."""
    return _integer(argument, value, 1, "positive")


def non_negative_integer(argument: str, value: Any) -> int:
    """The value as an int, or a ValueError that names the argument if it is not an integer of at least zero."""
    return _integer(argument, value, 0, "non-negative")


def random_seed(argument: str, value: Any) -> int:
    """The value as an int, or a ValueError that names the argument if NumPy cannot be seeded with it."""
    number = non_negative_integer(argument, value)
    if number >= 2**32:
        raise ValueError(f"{argument} must be less than 2**32, got {value!r}")
    return number


def _integer(argument: str, value: Any, least: int, kind: str) -> int:
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{argument} must be a {kind} integer, got {value!r}")
    return number


def proper_fraction(argument: str, value: Any) -> float:
    """The value as a float, or a ValueError that names the argument if it is not strictly between zero and one."""
    try:
        fits = bool(0.0 < value < 1.0)
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{argument} must be between zero and one, got {value!r}")
    return float(value)


def has_state(thing: Any) -> bool:
    """Whether a thing has ``state_dict`` and ``load_state_dict``, or ``get_extra_state`` and ``set_extra_state``."""
    return not isinstance(thing, type) and any(all(hasattr(thing, name) for name in pair) for pair in STATE_METHODS)


def states(things: Mapping[str, Any]) -> dict[str, Any]:
    """The states of the things that have one, by name."""
    return {name: _method(thing, 0)() for name, thing in things.items() if has_state(thing)}


def load_states(things: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load the states that :func:`states` returned; raises a ValueError before any if a thing has no state."""
    for name in saved:
        if not has_state(things.get(name)):
            kind = type(things.get(name)).__name__
            raise ValueError(f"{name} must have load_state_dict, because its state was saved, got {kind}")
    for name, state in saved.items():
        _method(things[name], 1)(state)


def _method(thing: Any, position: int) -> Any:
    return next(getattr(thing, pair[position]) for pair in STATE_METHODS if all(hasattr(thing, name) for name in pair))
