# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from pyro_radial.continual.coresets import random_coreset, split_coreset


def test_indices_are_sorted_distinct_and_of_the_seed():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    index = random_coreset(x, 20, seed=1)
    assert index.dtype == torch.int64
    assert index.tolist() == sorted(set(index.tolist()))
    assert len(index) == 20
    assert 0 <= index.min() <= index.max() < 50
    torch.manual_seed(7)  # The global generator is neither used nor moved.
    state = torch.get_rng_state()
    assert random_coreset(x, 20, seed=1).equal(index)
    assert torch.get_rng_state().equal(state)
    assert any(not random_coreset(x, 20, seed=seed).equal(index) for seed in range(2, 5))


def test_random_rows_are_uniform():
    x = torch.rand(5, 1)
    counts = torch.zeros(5)
    for seed in range(500):
        counts[random_coreset(x, 2, seed=seed)] += 1
    # 500 * 2 / 5 = 200 each, with a standard deviation of sqrt(500 * 0.4 * 0.6) = 11.
    assert (counts - 200).abs().max() < 4 * 11


def test_split_coreset_takes_apart_what_belongs_together():
    x = torch.arange(6.0)[:, None]
    coreset_x, coreset_y, (rest_x, rest_y) = split_coreset((x, torch.arange(6) * 10), torch.tensor([4, 1]))
    assert coreset_x[:, 0].tolist() == [4, 1]
    assert coreset_y.tolist() == [40, 10]
    assert rest_x[:, 0].tolist() == [0, 2, 3, 5]
    assert rest_y.tolist() == [0, 20, 30, 50]


@pytest.mark.parametrize(
    ("x", "size", "message"),
    [
        (torch.rand(4, 2), 0, "size must be a positive integer, got 0"),
        (torch.rand(4, 2), 4, "size must be less than the 4 rows of x, got 4"),
        (torch.rand(4, 2), True, "size must be a positive integer, got True"),
        (torch.tensor([[0.0], [float("nan")]]), 1, "x must not hold NaN"),
    ],
)
def test_bad_arguments_are_named(x, size, message):
    with pytest.raises(ValueError, match=message):
        random_coreset(x, size)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0.0]), "index must be integers"),
        (torch.tensor([True, False, False]), "index must be integers"),
        (torch.tensor([[0]]), "index must be integers of shape"),
        (torch.tensor([], dtype=torch.int64), "index must hold from 1 to 2 of 3 rows, each once .*, got 0"),
        (torch.tensor([0, 1, 2]), "index must hold from 1 to 2"),
        (torch.tensor([3]), "got 1 with 1 different rows from 3 to 3"),
        (torch.tensor([-1]), "from -1 to -1"),
        (torch.tensor([1, 1]), "got 2 with 1 different rows"),
    ],
)
def test_bad_indices_are_named(index, message):
    with pytest.raises(ValueError, match=message):
        split_coreset((torch.rand(3, 2), torch.rand(3)), index)
