# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0


import pytest
import torch

from pyro_radial.uncertainty import crps_from_draws, interval_coverage, quantile_calibration


def test_coverage_worked_by_hand():
    lower, upper = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = torch.tensor([1.0, 0.0, 3.5, -0.1])  # On either end, above, below.
    assert interval_coverage(lower, upper, y).item() == 0.5
    assert interval_coverage(lower[:, None], upper[:, None], y).item() == 0.5
    lower, upper = torch.stack([lower, lower - 1]), torch.stack([upper, upper + 1])
    assert interval_coverage(lower, upper, y).tolist() == [0.5, 1.0]
    assert interval_coverage(lower[..., None], upper[..., None], y[:, None]).tolist() == [0.5, 1.0]


def test_calibration_worked_by_hand():
    quantiles = torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 3.0]])
    curve = quantile_calibration(quantiles, [0.1, 0.5, 0.8], torch.tensor([1.0, 3.5]))
    assert curve.frequency.tolist() == [0.0, 0.5, 0.5]
    assert curve.count == 2
    assert curve.error.item() == pytest.approx((0.1 + 0.0 + 0.3) / 3)


def test_draws_worked_by_hand():
    """Draws 0, 1 and 4 and a target of 2: gaps 2, 1, 2; pairs 1, 4, 3 apart."""
    draws = torch.tensor([[4.0], [0.0], [1.0]])
    assert crps_from_draws(draws, torch.tensor([2.0])).item() == pytest.approx(5 / 3 - (8 / 3) / 2)
    assert crps_from_draws(draws + 1e4, torch.tensor([2.0 + 1e4])).item() == pytest.approx(1 / 3, rel=1e-6)
