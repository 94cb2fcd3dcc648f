# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A plugin that puts a guide or the distributions of the library into Pyro's own tests.

``PYRO_SUITE`` says what: the name of a guide, which then replaces Pyro's ``AutoNormal``, or ``distributions``, which
then replace those that Pyro's tests of every distribution run on. Pyro's files stay as they are.
"""

import inspect
import os

import pyro.infer.autoguide
import pytest

import pyro_radial
from pyro_radial.distributions import HypersphericalUniform, RadialNormal, VonMisesFisherStable

SUITE = os.environ.get("PYRO_SUITE", "distributions")

#: The tests that no other class than Pyro's can pass, or none here, and why, by a part of their name.
LEFT_OUT = {
    "funsor": {"AutoGaussianFunsor": "a guide of Pyro that needs the package funsor, which is not installed"},
    "guide": {
        "test_scores[": "asks for a density of one at each site, as Pyro's guides have: they sample an auxiliary site, "
        "whose density counts, and put a Delta on the model's. Ours sample the model's sites, so their densities count",
        "test_autonormal_dynamic_model": "asks a new guide to take over the parameters that another guide left in "
        "Pyro's store under the name of its class. Ours never share parameters",
    },
    "distributions": {
        "test_stable.py::test_sample[": "fails without this library too: Pyro 1.9 calls a function of SciPy in a way "
        "that SciPy 1.17 refuses",
        "test_infer_shapes[HypersphericalUniform]": "asks for the shapes that follow from those of the parameters; "
        "here the number of dimensions is itself the parameter. Pyro leaves out its LKJ for that",
        "test_gof[VonMisesFisherStable]": "knows only by the name of Pyro's ProjectedNormal that its densities are per "
        "area of the sphere. With that name the statistic is not calibrated: with the seed of Pyro's tests "
        "ProjectedNormal(zeros(3)) fails too",
        "test_gof[HypersphericalUniform]": "the same; with that name its p-value is ProjectedNormal(zeros(3))'s",
    },
}


def pytest_configure():
    if SUITE != "distributions":
        pyro.infer.autoguide.AutoNormal = getattr(pyro_radial, SUITE)


def pytest_pycollect_makeitem(collector, name, obj):
    """Give Pyro's tests of every distribution ours: a mark of the test goes before the parameters of the fixture."""
    is_test = name.startswith("test") and inspect.isfunction(obj) and collector.path.name == "test_distributions.py"
    if SUITE == "distributions" and is_test:
        for fixture in {"dist", "continuous_dist"} & inspect.signature(obj).parameters.keys():
            names = [row.pyro_dist.__name__ for row in _fixtures()]
            pytest.mark.parametrize(fixture, _fixtures(), indirect=True, ids=names)(obj)


def _fixtures():
    # Pyro's helper, from the checkout.
    from tests.distributions.dist_fixture import Fixture

    vector, rows = [0.3, -1.2, 2.0], [[0.3, -1.2, 2.0], [1.0, 0.0, -0.5]]
    unit, units = [0.6, 0.0, 0.8], [[0.6, 0.0, 0.8], [0.0, -1.0, 0.0]]
    return [
        Fixture(
            pyro_dist=RadialNormal,
            examples=[
                {"loc": vector, "scale": [0.5, 1.0, 2.0], "test_data": [0.5, -1.0, 1.0]},
                {"loc": [[1.0], [2.0]], "scale": [[0.5], [1.5]], "test_data": [[0.0], [2.5]]},
                {"loc": rows, "scale": [[0.5, 1.0, 2.0], [1.0, 1.0, 1.0]], "test_data": rows[::-1]},
            ],
        ),
        Fixture(
            pyro_dist=VonMisesFisherStable,
            examples=[
                {"loc": unit, "concentration": 3.0, "test_data": [0.0, 0.6, 0.8]},
                {"loc": units, "concentration": [0.5, 20.0], "test_data": units[::-1]},
            ],
        ),
        Fixture(
            pyro_dist=HypersphericalUniform,
            examples=[{"dim": 3, "test_data": unit}, {"dim": 3, "batch_shape": (2,), "test_data": units}],
        ),
    ]


def pytest_collection_modifyitems(config, items):
    reasons = LEFT_OUT["funsor"] | LEFT_OUT["distributions" if SUITE == "distributions" else "guide"]
    left_out = [item for item in items if any(part in item.nodeid for part in reasons)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
