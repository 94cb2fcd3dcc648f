# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measurement points: where they lie, and what does not fit a batch."""

import math

import pytest
import torch
from scipy import stats

from pyro_radial.functional import BetweenRows, UniformBox


def test_points_are_uniform_in_the_box():
    measurement_points = UniformBox([-1.0, 10.0], [0.0, 14.0], num_points=5000)
    points = measurement_points(torch.zeros(3, 2, dtype=torch.double))
    assert stats.kstest(points[:, 0].numpy(), "uniform", args=(-1, 1)).pvalue > 1e-3
    assert stats.kstest(points[:, 1].numpy(), "uniform", args=(10, 4)).pvalue > 1e-3
    assert abs(float(torch.corrcoef(points.T)[0, 1])) < 5 / math.sqrt(5000)


def test_the_box_around_training_inputs_widens_each_side_by_half_its_own_width_at_both_ends():
    x_train = torch.tensor([[0.0, 100.0, 7.0], [2.0, 110.0, 7.0], [1.0, 104.0, 7.0]])
    box = UniformBox.around(x_train, num_points=3)
    torch.testing.assert_close(box.low, torch.tensor([-1.0, 95.0, 7.0], dtype=torch.double))
    torch.testing.assert_close(box.high, torch.tensor([3.0, 115.0, 7.0], dtype=torch.double))
    tight = UniformBox.around(x_train, num_points=3, margin=0.0)
    torch.testing.assert_close(tight.high, x_train.amax(0).double())
    # A feature that never varies stays where it is.
    assert bool((box(x_train)[:, 2] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.double])
def test_points_have_the_dtype_of_the_batch_and_stay_in_the_box(dtype):
    x = torch.zeros(3, 2, dtype=dtype)
    data = torch.rand(50, 2, dtype=torch.double)
    box = UniformBox(-1.0, 0.3, num_points=4000)
    for measurement_points in (box, BetweenRows(data, num_points=5)):
        assert measurement_points(x).dtype == dtype
    points = box(x)
    assert bool((points <= torch.tensor(0.3, dtype=dtype)).all() and (points >= -1).all())


def test_points_between_rows_are_uniform_on_the_lines_between_any_two():
    """Rows that are the corners of a simplex, where a point names its two."""
    torch.manual_seed(0)
    points = BetweenRows(torch.eye(5), num_points=4000)(torch.zeros(2, 5))
    assert torch.equal((points > 0).sum(1), torch.full((4000,), 2))
    torch.testing.assert_close(points.sum(1), torch.ones(4000))
    pairs = (points > 0).long() @ 2 ** torch.arange(5)
    counts = torch.unique(pairs, return_counts=True)[1]
    assert len(counts) == 10
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    shares = points[points[:, 0] > 0, 0]
    assert stats.kstest(shares.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("measurement_points", "words"),
    [
        (UniformBox([0.0, 0.0], [1.0, 1.0], 3), r"low must have the shape .* \[3\], got \[2\]"),
        (UniformBox(0.0, [1.0, 1.0], 3), r"high must have the shape .* \[3\], got \[2\]"),
        (BetweenRows(torch.zeros(9, 2), 3), r"points must give points of the shape .* \[3\], got \[2\]"),
    ],
)
def test_points_of_another_width_than_the_batch_are_refused_by_name(measurement_points, words):
    with pytest.raises(ValueError, match=words):
        measurement_points(torch.zeros(5, 3))
    with pytest.raises(ValueError, match="points must have at least 2 rows, got 1"):
        BetweenRows(torch.zeros(1, 2), 3)


@pytest.mark.cuda
def test_on_cuda_points_are_where_the_batch_is():
    x = torch.zeros(5, 2, device="cuda")
    for measurement_points in (UniformBox(0.0, 1.0, 3), BetweenRows(torch.zeros(9, 2), 3)):
        assert measurement_points(x).is_cuda
