# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The package stays within its limits, and the counts are what they say."""

from pathlib import Path

import pytest

from tools.size import LIMITS, measure, vaguest_file

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''\
"""A docstring."""
from typing import Any

__all__ = ["first", "second"]


def first(value: Any) -> Any:
    """A docstring."""
    one, two = 1, 2
    three, four = value
    return [[a + b for a in value] for b in (one, two)], {a for b in value for a in b}, three, four  # and a comment
'''
PLOTS = """\
__all__ = ["COLORS", "plot_first", "second"]
COLORS = "a line of code that is longer than one hundred columns, as this one is, which counts as a long line"
"""


NAMES = """\
class Part:
    def __init__(self, own, *rest):
        self._found = own
        self.own_values = rest
        for own.other in rest:
            [both] = rest
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "__init__.py").write_text(MODULE)
    (tmp_path / "plots.py").write_text(PLOTS)
    (tmp_path / "inner.py").write_text('__all__ = ["third"]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_inner.py").write_text("found = 1\n")
    return tmp_path


@pytest.fixture
def counts(package):
    return measure(package)


def test_statements_are_nodes_of_the_syntax_tree_with_docstrings(counts):
    assert counts["statements"] == 8 + 2 + 1


def test_a_name_of_a_package_counts_once_and_helpers_of_plots_do_not(counts):
    assert counts["public names"] == len({"first", "second", "plot_first"})


def test_vague_names_are_counted_wherever_they_are_bound(package):
    (package / "inner.py").write_text(NAMES)
    counts = measure(package)
    bound_in_init, bound_in_plots = 11, 2
    # Part, __init__, own, rest, self._found, self.own_values and both; a filler in capitals or of two words is none.
    assert counts["vague names in a file"] == pytest.approx(100 * 4 / 7)
    vague_in_init = 2
    assert counts["vague names"] == pytest.approx(100 * (4 + vague_in_init) / (7 + bound_in_init + bound_in_plots))
    path, names = vaguest_file(package)
    assert path.name == "inner.py"
    assert names == {"own": 1, "rest": 1, "_found": 1, "both": 1}


def test_the_package_stays_within_its_limits():
    counts = measure(ROOT / "pyro_radial")
    assert {name: count for name, count in counts.items() if name in LIMITS and count > LIMITS[name]} == {}
    assert LIMITS.keys() <= counts.keys()
