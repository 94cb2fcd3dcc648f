# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
import torch

from pyro_radial._pyro.checks import (
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


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "0", None, [0.0], False])
def test_what_is_no_finite_number_of_at_least_zero_is_named(value):
    with pytest.raises(ValueError, match="noise must be a finite number, at least zero"):
        non_negative_float("noise", value)


@pytest.mark.parametrize(
    ("value", "got"),
    [(2, "int"), (np.ones(1), r"ndarray, which torch\.as_tensor converts"), (torch.Tensor, "the class Tensor")],
)
def test_the_first_argument_of_another_type_is_named(value, got):
    check_types(torch.Tensor, first=torch.ones(1), second=torch.ones(1))
    with pytest.raises(ValueError, match=f"^second must be a Tensor, got {got}"):
        check_types(torch.Tensor, first=torch.ones(1), second=value, third=3)
