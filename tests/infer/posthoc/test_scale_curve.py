# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A search ends where a known function is least."""

import math

import pytest
import torch

from pyro_radial.infer.posthoc.scale_curve import ScaleCurve, search_curve


@pytest.mark.parametrize("best", [0.02, 0.37, 1.0, 9.0])
def test_the_interval_shrinks_by_the_golden_ratio(best):
    tried = []

    def evaluate(number):
        tried.append(number)
        return math.log(number / best) ** 2, 0.5

    curve = search_curve(evaluate, 1e-2, 10.0, 7, 10)
    # Two steps of the grid, then nine times the golden ratio.
    assert abs(math.log(curve.best / best)) < 2 * math.log(1e3) / 6 * 0.6181**9
    assert len(tried) == len(set(tried)) == len(curve.numbers) == 17
    assert curve.numbers.tolist() == sorted(tried)
    assert float(curve.nll.min()) == evaluate(curve.best)[0]
    assert curve.standard_error.tolist() == [0.5] * 17
    assert not curve.at_end


@pytest.mark.parametrize("num_refinements", [0, 1, 2, 3])
def test_as_many_numbers_are_tried_as_asked_for(num_refinements):
    curve = search_curve(lambda number: (number, 0.0), 0.1, 1.0, 4, num_refinements)
    assert len(curve.numbers) == 4 + num_refinements
    assert curve.at_end
    assert curve.best == pytest.approx(0.1)


def test_the_best_is_that_of_the_lowest_nll():
    curve = ScaleCurve(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.4, math.inf]), torch.zeros(3))
    assert (curve.best, curve.at_end) == (2.0, False)
