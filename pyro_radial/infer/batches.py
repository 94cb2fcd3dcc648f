# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mini-batches of a training run, and their parts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_radial.infer.data import Rows, move, num_rows, take

__all__ = ["Batches", "parts"]


class Batches:
    """The rows of the data in batches: every epoch passes over each row once, in a random order of its own.

    :param Rows rows: the data.
    :param int size: rows of a batch; the last of an epoch may have fewer.
    :param int seed: of the orders; that of one epoch does not depend on the others.
    :param torch.device device: where batches go.
    """

    def __init__(self, rows: Rows, size: int, seed: int, device: torch.device) -> None:
        self.rows, self.size, self.seed, self.device = rows, size, seed, device
        self._latest: tuple[int, Tensor] | None = None

    @property
    def per_epoch(self) -> int:
        """The number of batches in one epoch."""
        return -(-len(self.rows) // self.size)

    def get(self, epoch: int, number: int) -> tuple[Any, Any]:
        """The inputs and targets of one batch of an epoch, both counted from zero."""
        return self._at(self._order(epoch)[number * self.size : (number + 1) * self.size])

    def first_rows(self) -> tuple[Any, Any]:
        """Two rows, or the only one: enough to run model and guide once."""
        return self._at(torch.arange(min(2, len(self.rows))))

    def _at(self, index: Tensor) -> tuple[Any, Any]:
        x, y = self.rows.take(index)
        return move(x, self.device), move(y, self.device)

    def _order(self, epoch: int) -> Tensor:
        seed = self.seed + epoch
        if self._latest is None or self._latest[0] != seed:
            self._latest = seed, torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed))
        return self._latest[1]


def parts(batch: tuple[Any, Any], number: int) -> Iterator[tuple[tuple[Any, Any], float]]:
    """A batch in parts, each with its share of the rows.

    :param batch: inputs and targets.
    :param int number: the most parts; a batch of fewer rows has one for each.
    """
    size = num_rows(batch[0])
    for index in torch.arange(size).chunk(number):
        yield (take(batch[0], index), take(batch[1], index)), len(index) / size
