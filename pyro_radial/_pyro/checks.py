# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Numbers that are out of range, named."""

import math
import operator
from typing import Any

__all__ = ["non_negative_integer", "positive_count", "positive_float", "proper_fraction"]


def positive_float(argument: str, value: Any) -> float:
    """The value as a float.

    :param str argument: the name to put in the message.
    :param value: a number of any kind, but no bool.
    :raises ValueError: if it is not positive and finite.
    """
    try:
        fits = not isinstance(value, bool) and bool(0.0 < value < math.inf)
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{argument} must be a positive finite number, got {value!r}")
    return float(value)


def positive_count(argument: str, value: Any) -> int:
    """The value as an int.

    :param str argument: the name to put in the message.
    :param value: an integer of any kind, but no bool.
    :raises ValueError: if it is missing, no integer, or less than one.
    """
    return _integer(argument, value, 1, "positive")


def non_negative_integer(argument: str, value: Any) -> int:
    """The value as an int, such as a seed.

    :param str argument: the name to put in the message.
    :param value: an integer of any kind, but no bool.
    :raises ValueError: if it is missing, no integer, or less than zero.
    """
    return _integer(argument, value, 0, "non-negative")


def _integer(argument: str, value: Any, least: int, kind: str) -> int:
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{argument} must be a {kind} integer, got {value!r}")
    return number


def proper_fraction(argument: str, value: Any) -> float:
    """The value as a float.

    :param str argument: the name to put in the message.
    :param value: a number of any kind.
    :raises ValueError: if it is not strictly between zero and one.
    """
    try:
        fits = bool(0.0 < value < 1.0)
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits:
        raise ValueError(f"{argument} must be between zero and one, got {value!r}")
    return float(value)
