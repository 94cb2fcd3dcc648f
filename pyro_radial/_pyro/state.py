# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The state of things that keep one, by the methods that torch's modules, optimizers and schedulers have."""

from collections.abc import Mapping
from typing import Any

__all__ = ["has_state", "load_states", "states"]

METHODS = (("state_dict", "load_state_dict"), ("get_extra_state", "set_extra_state"))


def has_state(thing: Any) -> bool:
    """Whether a thing has ``state_dict`` and ``load_state_dict``, or ``get_extra_state`` and ``set_extra_state``."""
    return not isinstance(thing, type) and any(all(hasattr(thing, name) for name in pair) for pair in METHODS)


def states(things: Mapping[str, Any]) -> dict[str, Any]:
    """The states of those that have one, by name."""
    return {name: _method(thing, 0)() for name, thing in things.items() if has_state(thing)}


def load_states(things: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Put back what :func:`states` returned."""
    for name, state in saved.items():
        _method(things[name], 1)(state)


def _method(thing: Any, position: int) -> Any:
    return next(getattr(thing, pair[position]) for pair in METHODS if all(hasattr(thing, name) for name in pair))
