# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoRadial
from pyro_radial._pyro.checks import check_types, non_negative_float, positive_count, positive_float


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


def warns():
    """Warn through the library and a module of torch."""
    AutoRadial(not_to_event).setup(torch.zeros(3))


def not_to_event(x):
    pyro.sample("w", dist.Normal(torch.zeros(3), 1.0))


class Caller:
    def method(self):
        warns()


def in_a_thread():
    with ThreadPoolExecutor(1) as threads:
        threads.submit(warns).result()


@pytest.mark.parametrize("call", [warns, Caller().method, in_a_thread])
def test_a_warning_names_the_users_line(call):
    with pytest.warns(UserWarning, match="every site") as caught:
        call()
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, warns.__code__.co_firstlineno + 2)}


def test_a_warning_names_the_line_of_a_cell():
    """Here the line of the cell is the user's first one."""
    cell = "guide = AutoRadial(not_to_event)\nguide.setup(x)"
    names = {**globals(), "x": torch.zeros(3), "__name__": "__main__"}
    with pytest.warns(UserWarning, match="every site") as caught:
        exec(compile(cell, "<cell 3>", "exec"), names)
    assert {(warning.filename, warning.lineno) for warning in caught} == {("<cell 3>", 2)}
