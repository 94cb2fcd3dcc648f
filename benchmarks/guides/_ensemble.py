# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Several guides, trained one after another from starts of their own, that predict as one."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyro_radial import Prediction, fit, predict


class Ensemble:
    """Train several guides, and predict with their equal mixture.

    :param make: a function of an integer seed that returns a new model and its guide.
    :param size: the number of members.
    :param seed: the seed from which the members' seeds are made.
    """

    def __init__(self, make: Callable[[int], Any], size: int, *, seed: int) -> None:
        self._make = make
        sequences = [np.random.SeedSequence([seed, index]) for index in range(size)]
        self._seeds = [int(sequence.generate_state(1)[0]) for sequence in sequences]
        #: The model and the guide of each member, once they are trained.
        self.members: list[Any] = []

    def fit(
        self, data: Any, *, optim: Callable[[Any], Any], loss: Any, checkpoint: Path | None = None, **settings: Any
    ) -> list[Any]:
        """Make and train every member, and return the results of their training.

        :param optim: a function from a member's guide to its optimizer.
        :param checkpoint: a folder for the checkpoints of the members.
        :param settings: other arguments of ``fit``; each member gets its own copy of the loss.
        """
        results = []
        for index, seed in enumerate(self._seeds):
            path = None if checkpoint is None else checkpoint / f"member_{index}.pt"
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model, guide = self._make(seed)
                own = {"optim": optim(guide), "loss": copy.deepcopy(loss), "checkpoint": path}
                results.append(fit(model, guide, data, seed=seed, progress=False, **own, **settings))
            self.members.append((model, guide))
        return results

    def predict(self, x: Any, num_samples: int) -> Prediction:
        """Predict with equal numbers of draws of each member."""
        joined: Prediction = Prediction.joined([predict(*member, x, num_samples) for member in self.members])
        return joined
