# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What is kept of the tasks of a stream."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_radial.continual.coresets import Coreset, split_coreset
from pyro_radial.continual.function_memory import FunctionMemory
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.streams import Pair, TaskStream
from pyro_radial.infer.training.data import device_of, num_rows

__all__ = ["KeptRows"]


class _Kept(NamedTuple):
    """Of one task."""

    head: int
    x: Tensor
    #: None where functions are kept.
    y: Tensor | None


class KeptRows:
    """The rows of a coreset, task by task: a task may be costly to build, and its rows to choose.

    :param Coreset coreset: how many, and how they are chosen.
    :param TaskStream stream: the tasks.
    :param int seed: of the choice.
    """

    def __init__(self, coreset: Coreset, stream: TaskStream, seed: int) -> None:
        self.coreset, self._stream, self._seed = coreset, stream, seed
        self._kept: dict[int, _Kept] = {}

    def rest(self, number: int) -> Pair:
        """Choose the rows of a task to keep; returns the others."""
        task, size = self._stream[number], self.coreset.size
        if size >= num_rows(task.train[0]):
            raise ValueError(
                f"train_stream: the size of coreset must be less than the {num_rows(task.train[0])} rows of task "
                f"{task.name!r}, got {size}"
            )
        (x, y), rest = split_coreset(task.train, self.coreset.choose(task.train[0], size, seed=self._seed))
        self._kept[number] = _Kept(task.head, x, y if self.coreset.use == "labels" else None)
        return rest

    def labeled(self, numbers: range) -> Pair:
        """The kept rows of tasks with their labels, one task after another."""
        kept = [self._of(number) for number in numbers]
        return torch.cat([rows.x for rows in kept]), torch.cat([rows.y for rows in kept if rows.y is not None])

    def heads(self, numbers: range) -> list[int]:
        """The heads of tasks, each once."""
        return list(dict.fromkeys(self._of(number).head for number in numbers))

    def functions(self, chain: PriorChain, number: int) -> list[FunctionMemory]:
        """The functions of a chain at the kept inputs of all tasks before one, for each head.

        :raises ValueError: naming the task, for a chain without such functions.
        """
        device = device_of(chain)
        # A single head has all tasks but the last, for which nothing is kept.
        capacity = self.coreset.size * (len(self._stream) - 1) if self._stream.num_heads == 1 else 0
        found = []
        for head in self.heads(range(number)):
            kept = [rows for rows in map(self._of, range(number)) if rows.head == head]
            try:
                found.append(
                    FunctionMemory.of(chain, torch.cat([rows.x for rows in kept]).to(device), head, capacity=capacity)
                )
            except ValueError as error:
                raise ValueError(
                    f"train_stream: coreset must have functions to keep before task {self._stream.names[number]!r}, "
                    f"but {error}"
                ) from error
        return found

    def check_inputs(self, number: int) -> None:
        """Refuse inputs of a task that do not fit those kept before under its head.

        :raises ValueError: naming the task.
        """
        task = self._stream[number]
        for kept in map(self._of, range(number)):
            if kept.head == task.head and kept.x.shape[1:] != task.train[0].shape[1:]:
                raise ValueError(
                    f"train_stream: inputs of task {task.name!r} must have the shape of those that coreset keeps under "
                    f"head {task.head}, {list(kept.x.shape[1:])}, got {list(task.train[0].shape[1:])}"
                )

    def _of(self, number: int) -> _Kept:
        if number not in self._kept:
            self.rest(number)
        return self._kept[number]
