# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How far a training has come: its records, its best epoch, and the sums of the epoch so far."""

import math
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from pyro_radial.infer.training.checkpoint import State

Record = dict[str, float]
TERMS = ("loss", "nll", "kl")


@dataclass
class Progress:
    """How far a training has come; a checkpoint holds all of it.

    :param Tensor sums: the loss, negative log-likelihood and KL of the epoch so far, on the device.
    :param start: the terms of the first step.
    :param kl_weight: the weight of the KL in the latest step.
    :param int best_epoch: the epoch with the best validation; the latest one until a validation is finite.
    :param best: a copy of the parameters after the best epoch.
    :param bool ended: whether the callback has ended the training.
    """

    sums: Tensor
    epoch: int = 0
    step_in_epoch: int = 0
    start: Record = field(default_factory=dict)
    kl_weight: float = 1.0
    history: list[Record] = field(default_factory=list)
    best_epoch: int = 0
    best: State | None = None
    ended: bool = False

    @property
    def epochs_since_best(self) -> int:
        """The number of epochs after the best one; all epochs count until a validation is finite."""
        return self.epoch - 1 - (0 if self.best is None else self.best_epoch)

    def add_step(self, terms: Tensor, kl_weight: float, rows: int, all_rows: int) -> None:
        """Add the terms of a step, ``[3]``, on some of all rows to those of the epoch."""
        self.kl_weight = kl_weight
        if not self.start:
            self.start = {**name_terms(terms), "kl_weight": kl_weight}
        self.sums += terms * rows / all_rows
        self.step_in_epoch += 1

    def improves(self, validation_nll: float) -> bool:
        """Return whether a validation is finite and better than all earlier ones."""
        if not math.isfinite(validation_nll):
            return False
        return self.best is None or validation_nll < self.history[self.best_epoch]["validation_nll"]

    def end_epoch(self, record: Record, improved: State | None) -> None:
        """Close an epoch with its record, and with a copy of the parameters if they are the best so far."""
        if improved is not None:
            self.best = improved
        if improved is not None or self.best is None:
            self.best_epoch = self.epoch
        self.history.append(record)
        self.epoch += 1
        self.step_in_epoch = 0
        self.sums = torch.zeros_like(self.sums)

    def state_dict(self) -> State:
        """Return all of it."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def load_state_dict(self, state: State) -> None:
        """Load what :meth:`state_dict` returned."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])


def name_terms(terms: Tensor) -> Record:
    """Return the terms of a loss by name; reads them on the host."""
    return dict(zip(TERMS, terms.tolist(), strict=True))
