# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the arms pay, by hand."""

import math

import pytest
import torch

from benchmarks.data.tables import load_table
from pyro_radial.decisions import ContextualBandit, classification_bandit, mushroom_bandit, wheel_bandit

X = torch.arange(12.0).reshape(4, 3)


def test_a_poisonous_mushroom_harms_every_second_time():
    bandit = mushroom_bandit(torch.eye(2), torch.tensor([0, 1]), num_steps=20_000, seed=3)
    poisonous = bandit.contexts[:, 1] == 1
    # Drawn with replacement, so half of them within four standard errors.
    assert abs(poisonous.float().mean() - 0.5) < 4 * 0.5 / math.sqrt(20_000)
    assert bandit.rewards[:, 0].unique().tolist() == [0.0]
    assert bandit.rewards[~poisonous, 1].unique().tolist() == [5.0]
    paid = bandit.rewards[poisonous, 1]
    assert paid.unique().tolist() == [-35.0, 5.0]
    assert abs(paid.mean() - -15.0) < 4 * 20.0 / math.sqrt(len(paid))
    assert bandit.expected[poisonous].unique(dim=0).tolist() == [[0.0, -15.0]]
    assert bandit.expected[~poisonous].unique(dim=0).tolist() == [[0.0, 5.0]]
    # Of an edible one left, and of a poisonous one eaten.
    assert bandit.gaps[~poisonous][0].tolist() == [5.0, 0.0]
    assert bandit.gaps[poisonous][0].tolist() == [0.0, 15.0]


def test_the_right_class_pays_one():
    labels = torch.tensor([2, 0, 1, 2])
    bandit = classification_bandit(X, labels, num_steps=8, standardize=False)
    rows = (bandit.contexts[:, 0] / 3).long()
    # Each row once before any comes again.
    assert [sorted(rows[:4].tolist()), sorted(rows[4:].tolist())] == [[0, 1, 2, 3]] * 2
    assert bandit.rewards.argmax(1).tolist() == labels[rows].tolist()
    assert bandit.rewards.sum(1).tolist() == [1.0] * 8
    assert bandit.expected is bandit.rewards


def test_features_are_standardized_where_they_vary():
    x = torch.cat([X, torch.ones(4, 1)], 1)
    bandit = classification_bandit(x, torch.tensor([0, 1, 0, 1]), num_steps=4)
    assert torch.allclose(bandit.contexts.mean(0), torch.zeros(4), atol=1e-6)
    assert torch.allclose(bandit.contexts.std(0, correction=0), torch.tensor([1.0, 1.0, 1.0, 0.0]))


@pytest.mark.parametrize("delta", [0.5, 0.95])
def test_one_arm_of_each_quadrant_pays_beyond_the_radius(delta):
    bandit = wheel_bandit(delta, num_steps=20_000, seed=1)
    x, radius = bandit.contexts, bandit.contexts.norm(dim=1)
    assert radius.max() <= 1
    beyond = radius > delta
    share = 1 - delta**2
    assert abs(beyond.float().mean() - share) < 4 * math.sqrt(share * (1 - share) / 20_000)
    assert bandit.expected[~beyond].unique(dim=0).tolist() == [pytest.approx([1.2, 1, 1, 1, 1])]
    for arm, signs in {1: (1, 1), 2: (1, -1), 3: (-1, 1), 4: (-1, -1)}.items():
        there = beyond & (x.sign() == torch.tensor(signs)).all(1)
        expected = [1.2, 1.0, 1.0, 1.0, 1.0]
        expected[arm] = 50.0
        assert bandit.expected[there].unique(dim=0).tolist() == [pytest.approx(expected)]
    noise = bandit.rewards - bandit.expected
    assert noise.std() == pytest.approx(0.01, rel=4 / math.sqrt(2 * noise.numel()))
    # Uniform on the disk: the radius squared is uniform.
    assert radius.square().mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * 20_000))


def test_a_seed_gives_one_bandit_and_leaves_the_generators_alone():
    before = torch.get_rng_state()
    one, other = (wheel_bandit(0.9, 50, seed=5) for _ in range(2))
    assert torch.equal(one.contexts, other.contexts)
    assert torch.equal(one.rewards, other.rewards)
    assert not torch.equal(one.rewards, wheel_bandit(0.9, 50, seed=6).rewards)
    assert torch.equal(torch.get_rng_state(), before)


def test_published_tables_make_bandits(data_dir):
    try:
        mushroom, adult = (load_table(name, data_dir) for name in ("mushroom", "adult"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    bandit = mushroom_bandit(mushroom.features, mushroom.labels, 100)
    assert (bandit.num_features, bandit.num_arms) == (117, 2)
    assert mushroom.class_names == ("e", "p")
    bandit = classification_bandit(adult.features, adult.labels, 100, name="adult")
    assert (bandit.num_features, bandit.num_arms, bandit.name) == (92, 14, "adult")


BAD = {
    "contexts must be a floating-point tensor of two dims, got torch.int64": (X.long(), X),
    r"rewards must be a floating-point tensor of two dims, got torch.float32 \[4\]": (X, X[:, 0]),
    r"contexts must have rows and columns, got \[4, 0\]": (X[:, :0], X),
    r"rewards must be finite, got nan at \[2, 1\]": (
        X,
        X.clone().index_put((torch.tensor(2), torch.tensor(1)), X.new_tensor(math.nan)),
    ),
    r"rewards must be finite, got inf at \[0, 0\]": (
        X,
        X.clone().index_put((torch.tensor(0), torch.tensor(0)), X.new_tensor(math.inf)),
    ),
    r"contexts must be finite, got -inf at \[0, 0\]": (
        X.clone().index_put((torch.tensor(0), torch.tensor(0)), X.new_tensor(-math.inf)),
        X,
    ),
    "rewards must have a row for each of 4 contexts, got 3": (X, X[:3]),
    r"expected must have the shape of rewards, \[4, 3\], got \[4, 2\]": (X, X, X[:, :2]),
}


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=range(len(BAD)))
def test_bad_tensors_are_named(message, arguments):
    with pytest.raises(ValueError, match=message):
        ContextualBandit(*arguments)


def test_bad_numbers_are_named():
    with pytest.raises(ValueError, match=r"wheel_bandit: delta must be between zero and one, got 1.5"):
        wheel_bandit(1.5, 10)
    with pytest.raises(ValueError, match=r"wheel_bandit: others < safe < high must hold, got 1.0, 0.5 and 50.0"):
        wheel_bandit(0.5, 10, safe=0.5)
    with pytest.raises(ValueError, match="wheel_bandit: seed must be a non-negative integer, got -1"):
        wheel_bandit(0.5, 10, seed=-1)
    with pytest.raises(ValueError, match="num_steps must be a positive integer, got 0"):
        mushroom_bandit(X, torch.zeros(4, dtype=torch.long), 0)
    with pytest.raises(ValueError, match="is_poisonous must hold integers from 0 below 2"):
        mushroom_bandit(X, torch.tensor([0, 1, 2, 0]), 5)
    with pytest.raises(ValueError, match="labels must have one number for each of 4 rows, got shape"):
        classification_bandit(X, torch.tensor([0, 1]), 5)
