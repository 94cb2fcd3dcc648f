# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop of a contextual bandit: a context, an arm, its reward, and a refit on a schedule."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.decisions._environments import Bandit
from benchmarks.decisions._policies import Policy
from pyro_radial._pyro.random_numbers import seeded

# Each decision and each refit has its own random numbers, whatever the policy draws before.
DECISION, REFIT = 0, 1
CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class BanditResult:
    """Arms, rewards and regrets of a run.

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

    @property
    def cumulative_regret(self) -> float:
        """Sum of all regrets."""
        return float(self.regrets.sum())

    def relative_regret(self, last: int | None = None) -> float:
        """Return the regret relative to choosing arms at random, which has 100.

        :param int last: number of decisions at the end to count; all by default. The last decisions measure the final
            policy without the cost of learning (Riquelme, Tucker and Snoek 2018, section 5).
        """
        last = len(self.regrets) if last is None else last
        return 100.0 * float(self.regrets[-last:].sum()) / float(self.uniform_regrets[-last:].sum())


def run_bandit(
    bandit: Bandit, policy: Policy, *, refit_every: int = 20, initial_pulls: int = 2, seed: int = 0
) -> BanditResult:
    """Let a policy decide in one context after the other, showing it only the rewards of the arms that it pulls.

    First, each arm is pulled ``initial_pulls`` times in turn; then the policy chooses. It learns from all decisions so
    far after the initial pulls and after every ``refit_every`` decisions. Random numbers depend on ``seed`` alone.

    :param Bandit bandit: contexts, and the reward of each arm in each context.
    :param Policy policy: policy to run; afterwards it holds what it learned in the last refit.
    :param int refit_every: decisions between refits.
    :param int initial_pulls: initial pulls of each arm.
    :param int seed: seed of all random numbers here; make the policy from a seed too.
    :returns: arms, rewards and regrets.
    """
    horizon, num_arms = bandit.rewards.shape
    first = num_arms * initial_pulls
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
        if done >= max(1, first) and (done - first) % refit_every == 0:
            with seeded(_seed(seed, done, REFIT), CPU):
                policy.refit(bandit.contexts[:done], arms[:done], rewards[:done])
    seconds = time.monotonic() - before
    gaps = (bandit.expected.amax(1, keepdim=True) - bandit.expected).double()
    regrets = gaps.gather(1, arms.unsqueeze(1)).squeeze(1)
    return BanditResult(arms, rewards, regrets, gaps.mean(1), seconds)


def _seed(seed: int, number: int, stage: int) -> int:
    return int(np.random.SeedSequence([seed, number, stage]).generate_state(1)[0])
