# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop of bandits: against regrets by hand, chance, and its own schedule."""

import pytest
import torch

from benchmarks.decisions._bandit_loop import run_bandit
from benchmarks.decisions._environments import Bandit
from benchmarks.decisions._policies import UniformPolicy

WEIGHTS = torch.tensor([[1.0, -0.5], [-1.0, 0.5], [0.2, 1.0]])


def linear_bandit(num_steps=60, noise=0.1):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_steps, 2, generator=generator)
    expected = x @ WEIGHTS.T
    return Bandit(x, expected + noise * torch.randn(expected.shape, generator=generator), expected)


def test_regrets_are_those_by_hand():
    expected = torch.tensor([[1.0, 3.0], [2.0, 0.0], [5.0, 5.5], [0.0, 1.0]])
    result = run_bandit(Bandit(torch.zeros(4, 1), expected + 7.0, expected), UniformPolicy(), initial_pulls=2)
    # All pulls are initial ones, in turn.
    assert result.arms.tolist() == [0, 1, 0, 1]
    assert result.rewards.tolist() == [8.0, 7.0, 12.0, 8.0]
    assert result.regrets.tolist() == [2.0, 2.0, 0.5, 0.0]
    assert result.uniform_regrets.tolist() == [1.0, 1.0, 0.25, 0.5]
    assert result.cumulative_regret == 4.5
    assert result.relative_regret() == pytest.approx(100 * 4.5 / 2.75)
    assert result.relative_regret(2) == pytest.approx(100 * 0.5 / 0.75)


def test_refits_come_once_all_arms_are_pulled_and_then_every_so_often():
    class Noting(UniformPolicy):
        def refit(self, contexts, arms, rewards):
            seen.append((len(contexts), len(arms), len(rewards)))

    seen = []
    run_bandit(linear_bandit(30), Noting(), refit_every=10, initial_pulls=2)
    assert seen == [(6, 6, 6), (16, 16, 16), (26, 26, 26)]
    seen = []
    run_bandit(linear_bandit(30), Noting(), refit_every=10, initial_pulls=0)
    assert [number for number, *_ in seen] == [10, 20, 30]
