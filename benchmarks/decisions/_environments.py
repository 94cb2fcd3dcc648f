# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Contextual bandits whose rewards are all known in advance, so that every policy meets the same ones."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Bandit(NamedTuple):
    """Contexts ``[T, D]``, the reward of each arm in each context ``[T, K]``, and its expectation ``[T, K]``."""

    contexts: Tensor
    rewards: Tensor
    expected: Tensor

    @property
    def num_features(self) -> int:
        """D, the width of a context."""
        return self.contexts.shape[1]

    @property
    def num_arms(self) -> int:
        """K."""
        return self.rewards.shape[1]


def mushroom_bandit(features: Tensor, is_poisonous: Tensor, num_steps: int, *, seed: int = 0) -> Bandit:
    """Mushrooms to eat (arm 1) or to leave (arm 0), drawn with replacement.

    Leaving one pays 0. An edible one pays 5. A poisonous one pays 5 or -35 with probability one half each, so its
    expected reward is -15.

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", appendix A.

    :param Tensor features: ``[N, D]``.
    :param Tensor is_poisonous: ``[N]``, zero or one.
    :param int num_steps: number of decisions, T.
    :param int seed: seed of the order and the rewards.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(features), (num_steps,), generator=generator)
    harmed = torch.rand(num_steps, generator=generator) < 0.5
    poisonous = is_poisonous[rows] == 1
    paid = torch.where(poisonous & harmed, -35.0, 5.0)
    expected = torch.where(poisonous, -15.0, 5.0)
    zero = torch.zeros(num_steps)
    return Bandit(features[rows], torch.stack([zero, paid], 1), torch.stack([zero, expected], 1))


def classification_bandit(features: Tensor, labels: Tensor, num_steps: int, *, seed: int = 0) -> Bandit:
    """A class to name for each row: the right arm pays 1, the others 0. No row repeats before all have come once.

    Features are standardized over the T contexts; a feature that does not vary becomes zero.

    Source: Riquelme et al. (2018), appendix A, on the statlog and adult data.

    :param Tensor features: ``[N, D]``.
    :param Tensor labels: ``[N]``, integers from 0 to K - 1.
    :param int num_steps: number of decisions, T.
    :param int seed: seed of the order.
    """
    generator = torch.Generator().manual_seed(seed)
    passes = -(-num_steps // len(features))
    rows = torch.cat([torch.randperm(len(features), generator=generator) for _ in range(passes)])[:num_steps]
    contexts = features[rows]
    spread = contexts.std(0, correction=0)
    contexts = (contexts - contexts.mean(0)) / torch.where(spread > 0, spread, 1.0)
    paid = torch.nn.functional.one_hot(labels[rows].long(), int(labels.max()) + 1).to(features.dtype)
    return Bandit(contexts, paid, paid)


def wheel_bandit(delta: float, num_steps: int, *, seed: int = 0) -> Bandit:
    r"""Contexts uniform on the unit disk; only a thin rim rewards exploration.

    Arm 0 always pays 1.2 and the four other arms pay 1. Beyond the radius :math:`\delta`, one of the four pays 50: arm
    1 where both coordinates are positive, arm 2 at (+, -), 3 at (-, +) and 4 at (-, -). All rewards have normal noise
    with standard deviation 0.01. A share :math:`1 - \delta^2` of the contexts is beyond.

    Source: Riquelme et al. (2018), section 5.4 and figure 3.

    :param float delta: the radius, between zero and one.
    :param int num_steps: number of decisions, T.
    :param int seed: seed of the contexts and the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    angle = 2.0 * math.pi * torch.rand(num_steps, generator=generator, dtype=torch.double)
    radius = torch.rand(num_steps, generator=generator, dtype=torch.double).sqrt()
    contexts = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    quadrant = 1 + 2 * (contexts[:, 0] < 0).long() + (contexts[:, 1] < 0).long()
    expected = torch.ones(num_steps, 5)
    expected[:, 0] = 1.2
    beyond = radius > delta
    expected[beyond, quadrant[beyond]] = 50.0
    rewards = expected + 0.01 * torch.randn(num_steps, 5, generator=generator)
    return Bandit(contexts.float(), rewards, expected)
