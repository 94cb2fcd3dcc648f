# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""No call of a public name merely passes: it gives a checked result, or an error that names the argument."""

import pytest

from tests.calls.sweep import Part, callables, names_argument, not_called, rows

ROWS = rows()
EXPECTED = callables()


@pytest.mark.parametrize("name", ROWS)
def test_the_valid_call_gives_a_right_result(name):
    assert ROWS[name].check(ROWS[name].run())


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(row.key, place, id=f"{row.key}-{'-'.join(changed)}-{place}")
        for row in ROWS.values()
        for place, (changed, _) in enumerate(row.also)
    ],
)
def test_another_valid_call_gives_a_right_result(name, place):
    changed, check = ROWS[name].also[place]
    assert check(ROWS[name].run(**changed))


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        pytest.param(row.key, argument, value, id=f"{row.key}-{argument}-{label}")
        for row in ROWS.values()
        for argument, values in row.invalid.items()
        for label, value in values.items()
    ],
)
def test_an_invalid_value_raises_an_error_that_names_the_argument(name, argument, value):
    with pytest.raises(ROWS[name].errors) as caught:
        ROWS[name].run(**{argument: value})
    assert names_argument(caught.value, value.name if isinstance(value, Part) else argument), str(caught.value)


@pytest.mark.parametrize("package", EXPECTED)
def test_each_argument_of_each_public_name_has_a_row(package):
    expected = EXPECTED[package]
    assert set(expected) <= {row.name for row in ROWS.values()} | set(not_called())
    for row in ROWS.values():
        if row.name in expected:
            arguments = set(expected[row.name])
            assert set(row.invalid) | set(row.unchecked) == arguments, row.key
            assert arguments <= set(row.valid()) | set(row.unchecked), row.key


def test_each_row_is_of_a_public_name():
    public = {name for own in EXPECTED.values() for name in own}
    called = {row.name for row in ROWS.values()}
    assert called <= public
    assert set(not_called()) <= public - called


@pytest.mark.parametrize("name", ROWS)
def test_each_argument_refuses_three_values_and_says_what_none_means(name):
    row = ROWS[name]
    for argument, values in row.invalid.items():
        assert len(values) >= 3, argument
        with_none = [changed for changed, _ in row.also if changed.get(argument, "") is None]
        assert "None" in values or row.valid().get(argument, "") is None or with_none, argument
