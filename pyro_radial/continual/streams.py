# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Streams of classification tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.infer.training.data import Rows

__all__ = ["Pair", "Task", "TaskStream"]

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream: inputs and targets to learn from and to be tested on.

    :param name: what tables and plots call the task, such as "classes 0, 1".
    :param train: inputs ``[N, ...]`` and targets ``[N, ...]`` to learn from.
    :param test: as ``train``, to measure by.
    :param validation: as ``train``, held out from it, or None.
    :param head: the output head that the task uses; 0 where all tasks share one.
    :raises ValueError: for a part without rows, with NaN, or with x and y of different lengths, and for a negative
        head; the message names the task and the part.
    """

    name: str
    train: Pair
    test: Pair
    validation: Pair | None = None
    head: int = 0

    def __post_init__(self) -> None:
        for part, data in (("train", self.train), ("test", self.test), ("validation", self.validation)):
            if data is not None:
                Rows(data, f"task {self.name!r}: {part}")
        if self.head < 0:
            raise ValueError(f"task {self.name!r}: head must be non-negative, got {self.head}")


@dataclass(frozen=True, eq=False)
class TaskStream(Sequence[Task]):
    """Tasks in the order in which they are learned, each built when it is asked for.

    A stream has a length, can be iterated over, and takes indices; a slice is a stream of some of the tasks with the
    same heads. Only the task asked for last is kept, so that many altered copies of a data set need not fit in memory.

    :param names: the names of the tasks, known without building them.
    :param builders: for each task a function without arguments that builds it, the same at every call.
    :param num_heads: number of output heads.
    :param num_outputs: number of outputs of each head.
    :raises ValueError: if there is no task, or a number does not fit; the message names the argument. A task that is
        built with another name or with a head that the stream lacks is an error when it is asked for.

    Example::

        >>> import torch
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
        >>> tasks = [Task("one", (x, y), (x, y)), Task("two", (x + 1, y), (x + 1, y))]
        >>> stream = TaskStream.of(tasks, num_outputs=2)
        >>> len(stream), stream[-1].name, [task.head for task in stream]
        (2, 'two', [0, 0])
    """

    names: tuple[str, ...]
    builders: tuple[Callable[[], Task], ...] = field(repr=False)
    num_heads: int
    num_outputs: int
    _latest: dict[int, Task] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("TaskStream: names must hold at least one task, got none")
        if len(self.names) != len(self.builders):
            raise ValueError(f"TaskStream: builders must be {len(self.names)}, one per name, got {len(self.builders)}")
        positive_count("TaskStream: num_heads", self.num_heads)
        positive_count("TaskStream: num_outputs", self.num_outputs)

    @classmethod
    def of(cls, tasks: Sequence[Task], *, num_outputs: int, num_heads: int = 1) -> TaskStream:
        """A stream of tasks that are in memory.

        :param tasks: the tasks in their order.
        :param num_outputs: number of outputs of each head.
        :param num_heads: number of output heads.
        :returns: the stream.
        """
        builders = tuple(partial(_same, task) for task in tasks)
        return cls(tuple(task.name for task in tasks), builders, num_heads=num_heads, num_outputs=num_outputs)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskStream: ...
    def __getitem__(self, index: int | slice) -> Task | TaskStream:
        if isinstance(index, slice):
            return replace(self, names=self.names[index], builders=self.builders[index])
        index = range(len(self))[index]
        if index not in self._latest:
            self._latest.clear()  # Before the next is built, so that there are never two.
            self._latest[index] = self._build(index)
        return self._latest[index]

    def _build(self, index: int) -> Task:
        task = self.builders[index]()
        if task.name != self.names[index]:
            raise ValueError(
                f"TaskStream: task {index} must be built with its name {self.names[index]!r}, got {task.name!r}"
            )
        if task.head >= self.num_heads:
            raise ValueError(f"task {task.name!r}: head must be less than num_heads={self.num_heads}, got {task.head}")
        return task


def _same(task: Task) -> Task:
    return task
