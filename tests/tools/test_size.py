# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The package stays within its limits, and the counts are what they say."""

import re
from pathlib import Path

import pytest

from tools.size import LIMITS, measure

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


@pytest.fixture
def counts(tmp_path):
    (tmp_path / "__init__.py").write_text(MODULE)
    (tmp_path / "plots.py").write_text(PLOTS)
    (tmp_path / "inner.py").write_text('__all__ = ["third"]\n')
    return measure(tmp_path)


@pytest.fixture(scope="module")
def own_counts():
    return measure(ROOT / "pyro_radial")


def test_statements_are_nodes_of_the_syntax_tree_with_docstrings(counts):
    assert counts["statements"] == 8 + 2 + 1


def test_a_name_of_a_package_counts_once_and_helpers_of_plots_do_not(counts):
    assert counts["public names"] == len({"first", "second", "plot_first"})


@pytest.mark.parametrize("what", LIMITS)
def test_the_package_stays_within_its_limits(own_counts, what):
    assert own_counts[what] <= LIMITS[what]


@pytest.mark.parametrize("what", LIMITS)
def test_contributing_states_each_limit(what):
    (stated,) = re.findall(r"The package has limits: (.*?)\. `tools", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert re.search(rf"(?<![\d.]){LIMITS[what]:,}(?![\d])", stated)
