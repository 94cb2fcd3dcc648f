# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import statistics

import pytest

from benchmarks.guides._eight_models import in_pyro
from benchmarks.guides._eight_models.data import MODELS


def losses(training, number=10):
    return [training.final(20) for _ in range(number)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in MODELS if not name.endswith(("128", "1024"))])
def test_a_model_in_numpyro_starts_at_the_loss_of_that_in_pyro(name):
    pytest.importorskip("numpyro")
    pytest.importorskip("funsor")
    from benchmarks.guides._eight_models import in_numpyro

    pyros = losses(in_pyro.Training(name, True, "SVI", 0.01))
    numpyro = in_numpyro.Training(name, True, "NumPyro", 0.01, 1)
    theirs = []
    for seed in range(10):
        numpyro.seed = seed
        theirs.append(numpyro.final(20))
    error = (statistics.variance(pyros) / 10 + statistics.variance(theirs) / 10) ** 0.5
    # Rounding, where the losses have no noise.
    bound = 4.0 * error + 1e-5 * abs(statistics.mean(pyros))
    assert abs(statistics.mean(pyros) - statistics.mean(theirs)) <= bound
