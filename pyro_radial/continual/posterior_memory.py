# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The posteriors before the last one, for a prior that is made of several."""

from collections.abc import Mapping
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import nn

from pyro_radial.continual.stored_distributions import StoredDistribution, StoredDistributions
from pyro_radial.distributions.logarithmic_pool import LogarithmicPool
from pyro_radial.poutine.swap_prior import replaced

__all__ = ["OWN_PRIOR", "PoolPosteriorsMessenger", "PosteriorMemory"]

# The entry of a site that keeps the distribution which the model gave it.
OWN_PRIOR = "own_prior"


class PosteriorMemory(nn.Module):
    """The posteriors that each site had before its last one, at most ``memory - 1``.

    :param int memory: how many posteriors of a site count, the last one among them.
    :param float decay: the weight of a posterior over that of the one after it.
    """

    def __init__(self, memory: int, decay: float) -> None:
        super().__init__()
        self.memory = memory
        self.decay = decay
        #: The newest first.
        self.by_age: Any = nn.ModuleList(StoredDistributions() for _ in range(memory - 1))

    def remember(self, posteriors: Mapping[str, StoredDistribution]) -> None:
        """Take over posteriors that make way for newer ones; what was here becomes older, the oldest is forgotten."""
        for age in self.by_age:
            older = age.stored(posteriors)
            age.update(posteriors)
            posteriors = older

    def of(self, name: str) -> list[Any]:
        """The posteriors of a site, the newest first."""
        return [age[name] for age in self.by_age if age.stored([name])]

    def pool(self, distributions: list[Any]) -> Any:
        """What the distributions of one site, the newest first, are together: weighted by age, and one alone itself."""
        if len(distributions) == 1:
            return distributions[0]
        weights = [self.decay**age for age in range(len(distributions))]
        return LogarithmicPool(distributions, [weight / sum(weights) for weight in weights], validate_args=False)

    def get_extra_state(self) -> dict[str, Any]:
        """What a state can only be loaded with."""
        return {"memory": self.memory, "memory_decay": self.decay}

    def set_extra_state(self, state: Any) -> None:
        """Nothing is left to do: the chain has compared it."""


class PoolPosteriorsMessenger(Messenger):
    """Gives each site whose prior was swapped the pool of its last posteriors, the new prior the first of them.

    The model's own prior, kept under :data:`OWN_PRIOR` before the swap, counts where there are too few.

    :param PosteriorMemory memory: the posteriors before the new priors.
    """

    def __init__(self, memory: PosteriorMemory) -> None:
        super().__init__()
        self.memory = memory

    def _pyro_sample(self, msg: Any) -> None:
        newest, own = msg["fn"], msg[OWN_PRIOR]
        if newest is own:
            return
        earlier = [replaced(msg["name"], posterior, own) for posterior in self.memory.of(msg["name"])]
        msg["fn"] = self.memory.pool([newest, *earlier, own][: self.memory.memory])
