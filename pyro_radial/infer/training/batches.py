# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mini-batches of a training run, and their parts."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_radial.infer.training.data import Rows, move, num_rows, take

__all__ = ["Batches", "parts"]


class Batches:
    """The rows of the data in batches: every epoch passes over each row once, in a random order of its own.

    Several processes have the same order, and each a part of every batch. Each has as many batches; where one has fewer
    rows than there are processes, those without any get one of the others' rows, at no share.

    :param Rows rows: the data.
    :param int size: rows of a batch in each process; the last of an epoch may have fewer.
    :param int seed: of the orders; that of one epoch does not depend on the others.
    :param torch.device device: where batches go.
    :param int rank: which of the processes this is.
    :param int processes: how many there are.
    """

    def __init__(
        self, rows: Rows, size: int, seed: int, device: torch.device, rank: int = 0, processes: int = 1
    ) -> None:
        self.rows, self.size, self.seed, self.device = rows, size, seed, device
        self._rank, self._processes = rank, processes
        self._latest: tuple[int, Tensor] | None = None

    @property
    def per_epoch(self) -> int:
        """The number of batches in one epoch."""
        return -(-len(self.rows) // self._whole_size)

    def get(self, epoch: int, number: int) -> tuple[Any, Any]:
        """The inputs and targets of this process in one batch of an epoch, both counted from zero."""
        whole = self._order(epoch)[number * self._whole_size : (number + 1) * self._whole_size]
        own = whole.tensor_split(self._processes)[self._rank]
        return self._at(own if len(own) else whole[:1])

    def share(self, number: int) -> float:
        """The part of one batch's rows that this process has."""
        whole = self.num_rows(number)
        return (whole // self._processes + (self._rank < whole % self._processes)) / whole

    def num_rows(self, number: int) -> int:
        """The rows of one batch in all processes."""
        return min(self._whole_size, len(self.rows) - number * self._whole_size)

    def first_rows(self) -> tuple[Any, Any]:
        """Two rows, or the only one: enough to run model and guide once."""
        return self._at(torch.arange(min(2, len(self.rows))))

    @property
    def _whole_size(self) -> int:
        return self.size * self._processes

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
