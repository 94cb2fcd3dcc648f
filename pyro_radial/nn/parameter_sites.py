# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The sites of a network's parameters: what they say to handlers and guides, and what these say to the network."""

from collections.abc import Collection
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_radial.nn.local.unit_noise import UnitNoise
from pyro_radial.poutine.local_reparameterization import ASKS, NOISE, PARAMETER

__all__ = ["AskForLocalReparameterization", "ParameterSites"]


class ParameterSites(Messenger):
    """Marks the sites that are parameters of a network, and collects those that a guide left undrawn.

    :param names: the names of the parameters.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._values: dict[str, Tensor] = {}
        #: The noise of the sites that were left undrawn, and the shape of their values.
        self.noises: dict[str, UnitNoise] = {}
        self.shapes: dict[str, torch.Size] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self._names:
            msg["infer"] = {**msg["infer"], PARAMETER: True}

    def _pyro_post_sample(self, msg: Any) -> None:
        name, noise = msg["name"], msg["infer"].get(NOISE)
        if noise is not None and name in self._names:
            self.noises[name], self.shapes[name], self._values[name] = noise, msg["fn"].shape(), msg["value"]

    def check(self, values: dict[str, Tensor]) -> None:
        """Raises a ValueError naming a site that was left undrawn while the prior computes a parameter from it."""
        for name, value in self._values.items():
            if values[name] is not value:
                raise ValueError(
                    f"local_reparameterization: prior must return the value of site {name!r} as it is, "
                    "got one that is computed from it, which needs a draw"
                )


class AskForLocalReparameterization(Messenger):
    """Asks guides for local reparameterization in calls of a model with targets.

    :param asks: whether a call asks, a function of its arguments.
    :param bool now: whether this one does.
    """

    def __init__(self, asks: Any, now: bool) -> None:
        super().__init__()
        self._asks, self._now = asks, now
        self._asked: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        if msg["infer"].get(PARAMETER):
            msg["infer"] = {**msg["infer"], ASKS: self._asks}
            self._asked.add(msg["name"])

    def _pyro_post_sample(self, msg: Any) -> None:
        # A guide's site brings its own dict; without a guide the model's is still there.
        infer = msg["infer"]
        if self._now and msg["name"] in self._asked and ASKS not in infer and NOISE not in infer:
            raise ValueError(
                f"SupervisedModel: guide must leave site {msg['name']!r} undrawn under local_reparameterization=True, "
                "got a draw; take a guide of this library, or wrap your own guide as "
                "local_reparameterization(guide, sites=...) if its sites are normal or radial"
            )

    def check(self, sites: Collection[str]) -> None:
        """Raises a ValueError naming a parameter that has no site of its own."""
        missing = [name for name in sites if name not in self._asked]
        if missing:
            raise ValueError(
                f"SupervisedModel: prior must have site {missing[0]!r} for local_reparameterization=True, "
                "got one that computes the parameter from other sites"
            )
