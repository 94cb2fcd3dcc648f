# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""No call of a public name merely passes: a faulty value raises an error that names the argument."""

import pytest

from tests.calls.sweep import Part, callables, made, names_argument, not_called, rows

ROWS = rows()
EXPECTED = callables()
ARGUMENTS = [(key, argument) for key, row in ROWS.items() for argument in {**row.parameters(), **row.extra}]


def problem_with(row, argument, value):
    """What is wrong with how a faulty value is refused, or None."""
    try:
        result = row.run(row.arguments() | {argument: value})
    except row.errors as error:
        named = value.name if isinstance(value, Part) else argument
        return None if names_argument(error, named) else f"the error does not name {named}: {error!r}"
    return f"{argument} takes {made(value)!r}, and returns {result!r}"


@pytest.mark.parametrize("name", ROWS)
def test_the_valid_call_passes(name):
    ROWS[name].run(ROWS[name].arguments())


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, a) for name, row in ROWS.items() for a, p in row.parameters().items() if p.default is None],
)
def test_an_argument_may_be_left_at_none(name, argument):
    arguments = ROWS[name].arguments()
    ROWS[name].run({other: value for other, value in arguments.items() if other != argument})


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_faulty_values_raise_an_error_that_names_the_argument(name, argument):
    row = ROWS[name]
    faults = row.faults(argument) if argument in row.parameters() else row.extra[argument]
    assert len(faults) >= 3
    for label, value in faults.items():
        problem = problem_with(row, argument, value)
        assert problem is None, f"{label}: {problem}"


@pytest.mark.parametrize("package", EXPECTED)
def test_each_public_name_has_a_row(package):
    assert EXPECTED[package] <= {row.name for row in ROWS.values()} | not_called()


def test_each_row_is_of_a_public_name():
    public = set().union(*EXPECTED.values())
    called = {row.name for row in ROWS.values()}
    assert called <= public
    assert not_called() <= public - called
