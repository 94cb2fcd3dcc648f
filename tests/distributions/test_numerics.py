# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from scipy import stats

from pyro_radial.distributions import numerics
from pyro_radial.distributions.numerics import MEAN_LOG_HALF_NORMAL, log_sphere_area, row_sum


@pytest.mark.parametrize(("dim", "area"), [(1, 2.0), (2, 2 * math.pi), (3, 4 * math.pi), (4, 2 * math.pi**2)])
def test_the_area_of_a_sphere_is_the_known_one(dim, area):
    assert log_sphere_area(dim) == pytest.approx(math.log(area), abs=1e-14)


def test_the_mean_log_of_a_half_normal_is_its_integral():
    assert stats.halfnorm.expect(math.log) == pytest.approx(MEAN_LOG_HALF_NORMAL, abs=1e-7)


@pytest.mark.parametrize("dim", [1, numerics._SHORT_ROW, numerics._SHORT_ROW + 1, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_of_a_row_is_exact_to_its_dtypes_last_digits(dim, dtype):
    rows = 1.0 + torch.rand(7, dim, dtype=dtype)
    value, exact = row_sum(rows), [math.fsum(row) for row in rows.tolist()]
    assert value.dtype == torch.float64
    # Few numbers of float32 are added in float32, each sum rounded to 6e-8.
    tolerance = 1e-6 if dtype == torch.float32 and dim <= numerics._SHORT_ROW else 1e-13
    assert value.tolist() == pytest.approx(exact, rel=tolerance)


def test_only_few_numbers_of_float32_are_added_in_float32():
    # In float32 the small ones vanish beside the large one.
    rows = torch.full((numerics._SHORT_ROW + 1,), 1e-4)
    rows[0] = 2.0**20
    exact = 2.0**20 + numerics._SHORT_ROW * float(rows[1])
    assert float(row_sum(rows)) == pytest.approx(exact, abs=1e-9)
    assert float(row_sum(rows[:-1])) != pytest.approx(exact - float(rows[1]), abs=1e-9)
