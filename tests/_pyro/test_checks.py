# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from pyro_radial._pyro.checks import (
    check_flag,
    check_types,
    non_negative_float,
    positive_count,
    positive_float,
)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, "0.1", None, [1.0], True])
def test_what_is_no_positive_finite_number_is_named(value):
    with pytest.raises(ValueError, match="gain must be a positive finite number"):
        positive_float("gain", value)


@pytest.mark.parametrize("value", [0, -3, 1.5, 2.0, "3", None, True])
def test_what_is_no_positive_integer_is_named(value):
    with pytest.raises(ValueError, match="num_data must be a positive integer"):
        positive_count("num_data", value)


@pytest.mark.parametrize("value", ["x", "False", 0, 1, 3, None, np.True_])
def test_what_is_no_flag_is_named(value):
    with pytest.raises(ValueError, match="strict must be True or False, got"):
        check_flag("strict", value)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "0", None, [0.0], False])
def test_what_is_no_finite_number_of_at_least_zero_is_named(value):
    with pytest.raises(ValueError, match="noise must be a finite number, at least zero"):
        non_negative_float("noise", value)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Mapping, [1], "options must be a Mapping, got list"),
        (Callable, None, "options must be a function, got NoneType"),
        (Callable, dict, "options must be a function, got the class dict"),
        (ArithmeticError, OverflowError, "options must be an ArithmeticError, got the class OverflowError"),
    ],
)
def test_an_argument_of_another_type_is_named(kind, value, message):
    with pytest.raises(ValueError, match=message):
        check_types(kind, options=value)


def test_the_first_argument_of_another_type_is_named():
    check_types(str, first="x", second="y")
    with pytest.raises(ValueError, match="second must be a str, got int"):
        check_types(str, first="x", second=2, third=3)
