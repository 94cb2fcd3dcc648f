# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the arms pay, by hand."""

import math

import pytest
import torch

from benchmarks.data.tables import load_table
from benchmarks.decisions._environments import classification_bandit, mushroom_bandit, wheel_bandit


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


def test_published_tables_make_bandits(data_dir):
    try:
        mushroom, adult = (load_table(name, data_dir) for name in ("mushroom", "adult"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    bandit = mushroom_bandit(mushroom.features, mushroom.labels, 100)
    assert (bandit.num_features, bandit.num_arms) == (117, 2)
    assert mushroom.class_names == ("e", "p")
    bandit = classification_bandit(adult.features, adult.labels, 100)
    assert (bandit.num_features, bandit.num_arms) == (92, 14)
