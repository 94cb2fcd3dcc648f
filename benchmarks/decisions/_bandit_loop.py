# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop of a contextual bandit: a context, an arm, its reward, and a refit on a schedule."""

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.decisions._environments import Bandit
from benchmarks.decisions._policies import Policy
from pyro_radial._pyro.random_numbers import seeded

# Each decision and each refit has its own random numbers, whatever the policy draws before.
DECISION, REFIT = 0, 1
INITIAL_PULLS = 2
CPU = torch.device("cpu")


class BanditResult(NamedTuple):
    """What a run decided.

    :param Tensor arms: arms pulled, ``[T]``.
    :param Tensor rewards: their rewards, ``[T]``.
    :param Tensor regrets: expected reward of the best arm in a context minus that of the arm pulled, float64 ``[T]``.
    :param Tensor uniform_regrets: expected regret of an arm chosen at random, float64 ``[T]``.
    :param float seconds: time of decisions and refits.
    """

    arms: Tensor
    rewards: Tensor
    regrets: Tensor
    uniform_regrets: Tensor
    seconds: float

    def relative_regret(self, last: int) -> float:
        """Return the regret of the last decisions relative to choosing arms at random, which has 100.

        The last ones measure the final policy without the cost of learning (Riquelme et al. 2018, section 5).
        """
        return 100.0 * float(self.regrets[-last:].sum()) / float(self.uniform_regrets[-last:].sum())


def run_bandit(bandit: Bandit, policy: Policy, *, refit_every: int, seed: int) -> BanditResult:
    """Let a policy decide in one context after the other, showing it only the rewards of the arms that it pulls.

    First, each arm is pulled twice in turn; then the policy chooses. It learns from all decisions so far after the
    initial pulls and after every ``refit_every`` decisions. Random numbers depend on ``seed`` alone; make the policy
    from a seed too.
    """
    horizon, num_arms = bandit.rewards.shape
    first = num_arms * INITIAL_PULLS
    arms = torch.zeros(horizon, dtype=torch.long)
    rewards = bandit.rewards.new_zeros(horizon)
    policy.begin(bandit.num_features, num_arms)
    before = time.monotonic()
    for number in range(horizon):
        if number < first:
            arm = number % num_arms
        else:
            with seeded(_seed(seed, number, DECISION), CPU):
                arm = policy.choose(bandit.contexts[number])
        arms[number] = arm
        rewards[number] = bandit.rewards[number, arm]
        done = number + 1
        if done >= first and (done - first) % refit_every == 0:
            with seeded(_seed(seed, done, REFIT), CPU):
                policy.refit(bandit.contexts[:done], arms[:done], rewards[:done])
    seconds = time.monotonic() - before
    gaps = (bandit.expected.amax(1, keepdim=True) - bandit.expected).double()
    regrets = gaps.gather(1, arms.unsqueeze(1)).squeeze(1)
    return BanditResult(arms, rewards, regrets, gaps.mean(1), seconds)


def _seed(seed: int, number: int, stage: int) -> int:
    return int(np.random.SeedSequence([seed, number, stage]).generate_state(1)[0])
