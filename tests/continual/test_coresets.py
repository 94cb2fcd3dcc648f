# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_radial.continual.coresets import k_center_coreset, random_coreset, split_coreset

CORESETS = [random_coreset, k_center_coreset]


def first_center(x, seed):
    (center,) = k_center_coreset(x, 1, seed=seed).tolist()
    return center


def squared_distances(x):
    """All pairs, exact for whole numbers."""
    return (x[:, None] - x[None]).square().flatten(2).sum(-1)


def greedy(x, size, center):
    """Gonzalez's algorithm word for word: the first of the farthest rows that are not yet centers."""
    distances, centers = squared_distances(x), [center]
    while len(centers) < size:
        others = [row for row in range(len(x)) if row not in centers]
        centers.append(max(others, key=lambda row: (min(distances[row, c] for c in centers), -row)))
    return sorted(centers)


def radius(x, centers):
    return squared_distances(x)[:, list(centers)].min(1).values.max().sqrt().item()


# Few whole numbers, so that ties and copies are common and distances exact.
POINTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(POINTS, st.integers(1, 8), st.integers(0, 20))
def test_k_center_is_the_greedy_algorithm(points, size, seed):
    x, size = torch.tensor(points).float(), min(size, len(points) - 1)
    assert k_center_coreset(x, size, seed=seed).tolist() == greedy(x, size, first_center(x, seed))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(POINTS, st.integers(1, 4), st.integers(0, 20))
def test_k_center_is_within_twice_the_best(points, size, seed):
    x, size = torch.tensor(points).float(), min(size, len(points) - 1)
    best = min(radius(x, centers) for centers in combinations(range(len(x)), size))
    assert radius(x, k_center_coreset(x, size, seed=seed)) <= 2 * best + 1e-6


def test_k_center_agrees_on_images():
    x = torch.randn(60, 1, 5, 5, generator=torch.Generator().manual_seed(3))
    assert k_center_coreset(x, 20, seed=5).tolist() == greedy(x.double(), 20, first_center(x, 5))


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 1e-3), (torch.float64, 1e-8), (torch.float16, 1.0)])
def test_copies_of_a_center_come_last(dtype, step):
    # Rows of so large a norm that ||x||^2 - 2 x.c + ||c||^2 rounds by more than the distance of those that differ.
    base = 100 * torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    different = base + step * torch.eye(300, dtype=torch.float64)[:8]
    x = torch.cat([base.repeat(20, 1), different, base.repeat(20, 1)]).to(dtype)
    for seed in range(10):
        assert len(x[k_center_coreset(x, 9, seed=seed)].unique(dim=0)) == 9


def test_bytes_are_compared_without_wrapping_around():
    x = torch.tensor([[0], [100], [255], [2]], dtype=torch.uint8)
    for seed in range(10):
        assert k_center_coreset(x, 3, seed=seed).tolist() == greedy(x.int(), 3, first_center(x, seed))


def test_copies_are_different_rows_all_the_same():
    x = torch.ones(5, 2)
    assert k_center_coreset(x, 4, seed=1).tolist() == greedy(x, 4, first_center(x, 1))


def test_ties_go_to_the_first_row():
    x = torch.tensor([[0.0], [1.0], [-1.0], [1.0], [-1.0]])
    seed = next(seed for seed in range(20) if first_center(x, seed) == 0)
    assert k_center_coreset(x, 2, seed=seed).tolist() == [0, 1]
    assert k_center_coreset(x, 3, seed=seed).tolist() == [0, 1, 2]


@pytest.mark.parametrize("choose", CORESETS)
def test_indices_are_sorted_distinct_and_of_the_seed(choose):
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    index = choose(x, 20, seed=1)
    assert index.dtype == torch.int64
    assert index.tolist() == sorted(set(index.tolist()))
    assert len(index) == 20
    assert 0 <= index.min() <= index.max() < 50
    torch.manual_seed(7)  # The global generator is neither used nor moved.
    state = torch.get_rng_state()
    assert choose(x, 20, seed=1).equal(index)
    assert torch.get_rng_state().equal(state)
    assert any(not choose(x, 20, seed=seed).equal(index) for seed in range(2, 5))


def test_random_rows_are_uniform():
    x = torch.rand(5, 1)
    counts = torch.zeros(5)
    for seed in range(500):
        counts[random_coreset(x, 2, seed=seed)] += 1
    # 500 * 2 / 5 = 200 each, with a standard deviation of sqrt(500 * 0.4 * 0.6) = 11.
    assert (counts - 200).abs().max() < 4 * 11


def test_the_first_center_is_drawn_by_the_seed():
    assert {first_center(torch.rand(4, 1), seed) for seed in range(30)} == {0, 1, 2, 3}


def test_split_coreset_takes_apart_what_belongs_together():
    x = torch.arange(6.0)[:, None]
    (coreset_x, coreset_y), (rest_x, rest_y) = split_coreset((x, torch.arange(6) * 10), torch.tensor([4, 1]))
    assert coreset_x[:, 0].tolist() == [4, 1]
    assert coreset_y.tolist() == [40, 10]
    assert rest_x[:, 0].tolist() == [0, 2, 3, 5]
    assert rest_y.tolist() == [0, 20, 30, 50]


@pytest.mark.parametrize("choose", CORESETS)
@pytest.mark.parametrize(
    ("x", "size", "message"),
    [
        (torch.rand(4, 2), 0, "size must be a positive integer, got 0"),
        (torch.rand(4, 2), -1, "size must be a positive integer, got -1"),
        (torch.rand(4, 2), 4, "size must be less than the 4 rows of x, got 4"),
        (torch.rand(4, 2), 9, "size must be less than"),
        (torch.rand(4, 2), 1.5, "size must be a positive integer, got 1.5"),
        (torch.rand(4, 2), True, "size must be a positive integer, got True"),
        (torch.tensor([[0.0], [float("nan")]]), 1, "x must not hold NaN"),
        ((torch.rand(4, 2),), 1, "x must be a Tensor"),
    ],
)
def test_bad_arguments_are_named(choose, x, size, message):
    with pytest.raises(ValueError, match=message):
        choose(x, size)


def test_k_center_needs_finite_inputs():
    with pytest.raises(ValueError, match="x must not hold infinity, got infinity in 1 of 3 rows, first in row 2"):
        k_center_coreset(torch.tensor([[0.0], [1.0], [float("inf")]]), 2)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0.0]), "index must be integers"),
        (torch.tensor([True, False, False]), "index must be integers"),
        (torch.tensor([[0]]), "index must be integers of shape"),
        (torch.tensor([], dtype=torch.int64), "index must hold from 1 to 2 of 3 rows, got 0"),
        (torch.tensor([0, 1, 2]), "index must hold from 1 to 2"),
        (torch.tensor([3]), "index must be from 0 to 2"),
        (torch.tensor([-1]), "index must be from 0 to 2"),
        (torch.tensor([1, 1]), "index must not hold a row twice"),
    ],
)
def test_bad_indices_are_named(index, message):
    with pytest.raises(ValueError, match=message):
        split_coreset((torch.rand(3, 2), torch.rand(3)), index)


def test_bad_data_is_named():
    with pytest.raises(ValueError, match="data: y must have as many rows as x, got 2 for 3"):
        split_coreset((torch.rand(3, 2), torch.rand(2)), torch.tensor([0]))
