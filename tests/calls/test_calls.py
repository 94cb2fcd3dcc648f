# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""No faulty value merely passes: each raises an error that names the argument."""

import importlib
import inspect

import pytest

from tests.calls.sweep import Part, made, names_argument, rows
from tests.helpers.pages import module_of_site

ROWS = rows()
#: What others return, or what is called by no user.
NOT_CALLED = {"functional.FunctionPrior", "infer.Prediction", "testing.DistributionTests", "testing.GuideTests"}


def problem_with(row, argument, value):
    """What is wrong with how a faulty value is refused, or None."""
    try:
        result = row.run({argument: value})
    except row.errors as error:
        named = value.name if isinstance(value, Part) else argument
        return None if names_argument(error, named) else f"the error does not name {named}: {error!r}"
    return f"{argument} takes {made(value)!r}, and returns {result!r}"


@pytest.mark.parametrize("name", ROWS)
def test_the_valid_call_passes(name):
    ROWS[name].run({})


@pytest.mark.parametrize("name", ROWS)
def test_faulty_values_raise_an_error_that_names_the_argument(name):
    row = ROWS[name]
    problems = {
        f"{argument}, {label}": problem_with(row, argument, value)
        for argument, values in row.faults().items()
        for label, value in values.items()
    }
    assert [f"{fault}: {problem}" for fault, problem in problems.items() if problem is not None] == []


def test_each_public_name_with_arguments_has_a_row():
    names = {
        f"{package}.{name}".removeprefix("pyro_radial.")
        for package, members in module_of_site("reference").pages().items()
        for name in members
        if callable(member := getattr(importlib.import_module(package), name)) and inspect.signature(member).parameters
    }
    assert names - {row.name for row in ROWS.values()} - NOT_CALLED == set()
