# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The list of mended faults names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = (ROOT / "tests" / "MENDED.md").read_text()
FILES = sorted(set(re.findall(r"\btests/[\w/]+\.py", LIST)))
NAMES = sorted(set(re.findall(r"::(test_\w+)", LIST)))


@pytest.fixture(scope="module")
def text():
    return "".join((ROOT / file).read_text() for file in FILES)


@pytest.mark.parametrize("name", NAMES)
def test_a_test_in_the_list_exists(name, text):
    assert f"def {name}(" in text
