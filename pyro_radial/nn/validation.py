# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Arguments that are out of range, named."""

import math
import operator
from typing import Any

__all__ = ["positive_count", "positive_float"]


def positive_float(argument: str, value: Any) -> float:
    """
    The value as a float.

    :param str argument: the name to put in the message.
    :param value: a number.
    :raises ValueError: if it is not positive and finite.
    """
    try:
        fits = 0.0 < value < math.inf
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{argument} must be positive and finite, but is {value!r}")
    return float(value)


def positive_count(argument: str, meaning: str, value: Any) -> int:
    """
    The value as an int.

    :param str argument: the name to put in the message.
    :param str meaning: what it counts.
    :param value: an integer of any kind.
    :raises ValueError: if it is missing, no integer, or less than one.
    """
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{argument}, {meaning}, must be a positive integer, but is {value!r}")
    return count
