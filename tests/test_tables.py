# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every row of the tables through every generic test, as a user's subclass would run them, and against references."""

import itertools

import pyro
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_radial.distributions.moments import center, moments
from pyro_radial.distributions.storage import describe, rebuild
from pyro_radial.testing import DistributionTests
from tests.helpers.guides import OwnGuideTests
from tests.tables import DISTRIBUTIONS, GUIDES

NUM_SAMPLES = 10_000
STANDARD_ERRORS = 4.0

for _name, _row in DISTRIBUTIONS.items():
    _class = type(f"Test{_name}", (DistributionTests,), {"make": lambda self, dtype, row=_row: row.make(dtype)})
    globals()[_class.__name__] = _class

for _name, _make in GUIDES.items():
    _class = type(
        f"Test{_name}", (OwnGuideTests,), {"make": lambda self, model, make=_make, **kwargs: make(model, **kwargs)}
    )
    globals()[_class.__name__] = _class
del _class

all_rows = pytest.mark.parametrize("row", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())


@all_rows
def test_the_kl_is_the_mean_of_the_difference_of_log_densities(row):
    if row.kl_to is None:
        pytest.skip("this row names no distribution with a KL in closed form")
    q, p = row.make(torch.float64), row.kl_to(torch.float64)
    kl = kl_divergence(q, p)
    draws = q.sample(torch.Size((NUM_SAMPLES,)))
    difference = q.log_prob(draws) - p.log_prob(draws)
    error = difference.std(0) / NUM_SAMPLES**0.5
    assert kl.shape == q.batch_shape
    assert bool((kl >= 0).all())
    assert bool(((difference.mean(0) - kl).abs() <= STANDARD_ERRORS * error + 1e-9).all())


@all_rows
def test_the_density_is_scipys(row):
    if row.scipy is None:
        pytest.skip("SciPy has no such distribution")
    distribution = row.make(torch.float64)
    value = distribution.sample()
    log_prob = distribution.log_prob(value)
    for index in itertools.product(*(range(size) for size in distribution.batch_shape)):
        assert float(log_prob[index]) == pytest.approx(row.scipy(distribution, value[index].numpy(), index), abs=1e-9)


@all_rows
def test_it_is_stored_and_comes_back(row):
    distribution = row.make(torch.float64)
    twin = rebuild(*describe(distribution))
    value = distribution.sample()
    assert type(twin) is type(distribution)
    assert torch.equal(twin.log_prob(value), distribution.log_prob(value))


@all_rows
def test_its_moments_and_center_are_its_own(row):
    distribution = row.make(torch.float64)
    mean, stddev = moments(distribution)
    torch.testing.assert_close(mean, distribution.mean)
    torch.testing.assert_close(stddev, distribution.variance.sqrt())
    torch.testing.assert_close(center(distribution), distribution.mean)


def test_the_tables_have_rows_of_every_public_distribution():
    import pyro_radial.distributions as ours

    classes = {getattr(ours, name) for name in ours.__all__ if isinstance(getattr(ours, name), type)}
    pyro.set_rng_seed(0)
    made = {type(layer) for row in DISTRIBUTIONS.values() for layer in [row.make(torch.float64)]}
    assert classes <= made
