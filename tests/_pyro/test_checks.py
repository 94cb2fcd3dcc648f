# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest

from pyro_radial._pyro.checks import check_flag, positive_count, positive_float


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, "0.1", None, [1.0], True])
def test_what_is_no_positive_finite_number_is_named(value):
    with pytest.raises(ValueError, match="gain must be a positive finite number"):
        positive_float("gain", value)


def test_numbers_of_any_kind_pass():
    assert positive_float("gain", 2) == 2.0
    assert positive_float("gain", np.float32(0.5)) == 0.5
    assert positive_count("num_data", np.int64(7)) == 7


@pytest.mark.parametrize("value", [0, -3, 1.5, 2.0, "3", None, True])
def test_what_is_no_positive_integer_is_named(value):
    with pytest.raises(ValueError, match="num_data must be a positive integer"):
        positive_count("num_data", value)


@pytest.mark.parametrize("value", ["x", "False", 0, 1, 3, None, np.True_])
def test_what_is_no_flag_is_named(value):
    with pytest.raises(ValueError, match="strict must be True or False, got"):
        check_flag("strict", value)


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_returned_as_it_is(value):
    assert check_flag("strict", value) is value
