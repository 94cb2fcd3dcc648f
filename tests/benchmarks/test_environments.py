# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the arms pay, by hand."""

import math

import pytest
import torch

from benchmarks.decisions._environments import classification_bandit, mushroom_bandit
from benchmarks.decisions._tables import load_table


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


def test_published_tables_make_bandits(data_dir):
    try:
        mushroom, adult = (load_table(name, data_dir) for name in ("mushroom", "adult"))
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    bandit = mushroom_bandit(mushroom.features, mushroom.labels, 100)
    assert (bandit.num_features, bandit.num_arms) == (117, 2)
    bandit = classification_bandit(adult.features, adult.labels, 100)
    assert (bandit.num_features, bandit.num_arms) == (92, 14)
