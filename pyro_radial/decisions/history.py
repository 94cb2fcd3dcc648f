# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a policy has seen."""

import math
from typing import NamedTuple

from torch import Tensor

__all__ = ["History"]


class History(NamedTuple):
    """Decisions in the order of time, and what they paid.

    :param Tensor contexts: ``[N, D]``.
    :param Tensor arms: ``[N]``, integers.
    :param Tensor rewards: ``[N]``.
    """

    contexts: Tensor
    arms: Tensor
    rewards: Tensor

    def targets(self, num_arms: int) -> Tensor:
        """The rewards by arm, ``[N, K]``, NaN where the arm was not pulled.

        Example::

            >>> import torch
            >>> History(torch.zeros(2, 3), torch.tensor([1, 0]), torch.tensor([5.0, 7.0])).targets(2)
            tensor([[nan, 5.],
                    [7., nan]])
        """
        targets = self.rewards.new_full((len(self.arms), num_arms), math.nan)
        return targets.scatter_(1, self.arms.unsqueeze(1), self.rewards.unsqueeze(1))

    def of_arm(self, arm: int) -> tuple[Tensor, Tensor]:
        """The contexts ``[n, D]`` in which an arm was pulled, and its rewards ``[n]``; none if it never was."""
        pulled = self.arms == arm
        return self.contexts[pulled], self.rewards[pulled]
