# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The tests that the page on silent mistakes names exist, and each mended mistake has one."""

import re

import pytest

from tests.helpers.pages import DOCS, ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (DOCS / "silent_mistakes.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| program", "| ---"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_the_tests_of_a_mistake_exist(row):
    _, _, now, named = row
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
    assert named == ", ".join(f"`{file}::{test}`" for file, test in tests)
    assert tests or now.startswith("*Open*")
    for file, test in tests:
        assert re.search(rf"^ *def {test}\(", (ROOT / file).read_text(), flags=re.MULTILINE), f"{file} has no {test}"


def test_all_mistakes_are_read():
    assert len(ROWS) >= 40
