# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import re

import pytest

from benchmarks.guides._examples.changes import CHANGES
from benchmarks.guides.pyro_examples import PROGRAMS, TARGET, changed, measure

# Quick ones of each kind; ``make soak`` runs all.
IN_THE_SUITE = {
    "eight_schools",
    "eight_schools, LocScaleReparam",
    "neutra, AutoIAFNormal",
    "AutoStructured",
    "AutoGuideList",
    "lkj",
    "coin",
    "sir_hmc, SVI",
    "vae",
    "sparse_gamma_def, EasyGuide",
    "svgp",
    # Changes that only programs of several sites, plates or handlers know; the others have tests of the guards.
    "module's attribute",
    "mini-batch",
    "size of the data",
    "added site",
    "poutine.condition",
    "parameter set again",
    "module that counts",
    "branch on a draw",
    "length of pyro.markov",
    "sequential plate",
}
# A shape depends on values, in a line of Pyro's or of the program's.
EAGER = ("AutoNormalizingFlow", "cvae")
# Where a program is no graph after a change between steps, and why.
NO_GRAPH = {
    "module that counts": "it changes .*calls while it runs",
    "branch on a draw": "reads the value of a tensor",
    "branch on data": "reads the value of a tensor",
    "sequential plate": "reads the value of a tensor",
}


def marks(name):
    return [] if name in IN_THE_SUITE else pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in PROGRAMS])
def test_no_program_of_pyros_examples_gets_a_wrong_gradient(name):
    row = measure(name, 1, compile=False)
    if name in IN_THE_SUITE:
        assert row["eagerly"] == ""
    assert "fails" in row or float(row["error"]) <= TARGET


@pytest.mark.parametrize("name", EAGER)
def test_a_program_that_is_no_graph_runs_eagerly_with_a_reason(name):
    row = measure(name, 1, compile=False)
    assert re.search(r"a shape that depends on values.* \(\w+\.py, line \d+\)$", row["eagerly"])
    assert float(row["error"]) <= TARGET


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CHANGES])
def test_a_changed_program_gets_the_gradients_of_the_change(name):
    row = changed(name)
    assert float(row["error"]) <= TARGET
    assert bool(row["eagerly"]) == (name in NO_GRAPH)
    if name in NO_GRAPH:
        assert re.search(NO_GRAPH[name] + r".* \(changes.py, line \d+\)", row["eagerly"])
