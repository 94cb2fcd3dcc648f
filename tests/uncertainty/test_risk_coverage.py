# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import pytest
import torch

from pyro_radial.uncertainty import risk_coverage


def test_worked_by_hand():
    curve = risk_coverage(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.9, 0.1, 0.4, 0.2]))
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert curve.area.item() == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 4)


def test_ties_have_the_mean_over_their_orders():
    losses = torch.tensor([0.0, 3.0, 1.0, 7.0, 2.0], dtype=torch.float64)
    uncertainty = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0])
    orders = [[0, *middle, 4] for middle in itertools.permutations([1, 2, 3])]
    expected = sum(losses[order].cumsum(0) / torch.arange(1, 6) for order in orders) / len(orders)
    torch.testing.assert_close(risk_coverage(losses, uncertainty).risk, expected)


def test_the_order_of_losses_is_best_and_its_reverse_worst():
    losses = torch.rand(40, dtype=torch.float64)
    best, worst = risk_coverage(losses, losses).area, risk_coverage(losses, -losses).area
    assert best < risk_coverage(losses, torch.rand(40)).area < worst
    assert risk_coverage(losses, torch.zeros(40)).area.item() == pytest.approx(losses.mean().item())


@pytest.mark.parametrize("bad", [torch.zeros(0), torch.zeros(3, 1), torch.tensor([0.0, math.inf, 1.0])])
def test_bad_arguments_are_named(bad):
    good = torch.arange(3.0)
    with pytest.raises(ValueError, match="risk_coverage: uncertainty must"):
        risk_coverage(good, bad)
    with pytest.raises(ValueError, match="risk_coverage: losses must"):
        risk_coverage(bad, good)
    with pytest.raises(ValueError, match=r"risk_coverage: losses must have shape \[3\], got \[2\]"):
        risk_coverage(good[:2], good)
