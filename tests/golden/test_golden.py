# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The programs return what they returned when their values were stored."""

import pytest

from tests.golden.programs import all_programs, run
from tests.golden.stored import FOLDER, mismatches, read


# The stream's functions forbid the classes of its second task, as they did when the values were stored.
@pytest.mark.filterwarnings("ignore:task 'classes 2, 3' has classes")
@pytest.mark.parametrize("name", all_programs())
def test_a_program_returns_what_it_did(name):
    assert mismatches(run(all_programs()[name]), read(name)) == {}


def test_each_file_of_values_has_a_program():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(all_programs())
