# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest

from benchmarks.guides.pyro_examples import PROGRAMS, TARGET, changed, measure

# Quick ones of each kind; ``make soak`` runs all.
IN_THE_SUITE = {
    "eight_schools",
    "eight_schools, LocScaleReparam",
    "neutra, AutoIAFNormal",
    "AutoStructured",
    "AutoGuideList",
    "sir_hmc, SVI",
    "vae",
    "sparse_gamma_def, EasyGuide",
    "svgp",
}
# Python reads a value, or a shape depends on one.
EAGER = ("lkj", "AutoNormalizingFlow", "coin", "cvae")
# What changes between steps, and whether the program is still a graph.
FOLLOWED = {
    "tensor in a closure, filled": True,
    "number as argument": True,
    "tensor as argument": True,
    "mini-batch": True,
    "particles": True,
    "parameter set again": True,
    "branch on a draw": False,
    "branch on data": False,
    "length of pyro.markov": False,
    "sequential plate": False,
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
    assert row["eagerly"]
    assert float(row["error"]) <= TARGET


@pytest.mark.parametrize(("name", "in_a_graph"), FOLLOWED.items(), ids=FOLLOWED)
def test_a_changed_program_gets_the_gradients_of_the_change(name, in_a_graph):
    row = changed(name)
    assert float(row["error"]) <= TARGET
    assert (row["eagerly"] == "") == in_a_graph
