# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Streams of tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

from torch import Tensor

from pyro_radial._pyro.checks import non_negative_integer, positive_count
from pyro_radial.infer.data import Rows

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    :param name: the name of the task in tables and plots, such as "classes 0, 1".
    :param train: inputs ``[N, ...]`` and targets ``[N, ...]`` to learn from.
    :param test: inputs and targets to measure on.
    :param validation: inputs and targets held out from ``train``, or None.
    :param head: the output head of the task; 0 if all tasks share one.
    :raises ValueError: naming the task and the part, for a part without rows, with NaN, or with x and y of different
        lengths, and for a negative head.
    """

    name: str
    train: Pair
    test: Pair
    validation: Pair | None = None
    head: int = 0

    def __post_init__(self) -> None:
        for role in ("train", "test", "validation"):
            data = getattr(self, role)
            if data is not None or role != "validation":
                rows = Rows(data, f"task {self.name!r}: {role}")
                if rows.dataset is not None:
                    raise ValueError(
                        f"task {self.name!r}: {role} must be a pair (x, y) of tensors, got "
                        f"{type(rows.dataset).__name__}"
                    )
                object.__setattr__(self, role, rows.tensors)
        non_negative_integer(f"task {self.name!r}: head", self.head)


@dataclass(frozen=True, eq=False)
class TaskStream(Sequence[Task]):
    """Tasks in the order they are learned, each built on access.

    A stream is a sequence; a slice is a stream of some of the tasks with the same heads. Only the latest task is kept,
    so many altered copies of a data set need not fit in memory.

    :param names: the names of the tasks.
    :param builders: for each task a function without arguments that builds it, the same at every call.
    :param num_heads: number of output heads.
    :param num_outputs: number of outputs of each head.
    :raises ValueError: naming the argument, if there is no task or a number does not fit; on access, for a task with
        another name or with a head that the stream lacks.

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
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "builders", tuple(self.builders))
        if not self.names:
            raise ValueError("names must hold at least one task, got none")
        if len(self.names) != len(self.builders):
            raise ValueError(
                f"builders must be {len(self.names)}, one per name, got {len(self.builders)}"
            )
        positive_count("num_heads", self.num_heads)
        positive_count("num_outputs", self.num_outputs)

    @classmethod
    def of(cls, tasks: Sequence[Task], *, num_outputs: int, num_heads: int = 1) -> "TaskStream":
        """Make a stream of tasks in memory.

        :param tasks: the tasks in order.
        :param num_outputs: number of outputs of each head.
        :param num_heads: number of output heads.
        :returns: the stream.
        :raises ValueError: naming the argument, or the task whose head is not among ``num_heads``.
        """
        if not tasks:
            raise ValueError("tasks must hold at least one task, got none")
        builders = tuple(partial(_return_task, task) for task in tasks)
        stream = cls(
            tuple(task.name for task in tasks),
            builders,
            num_heads=num_heads,
            num_outputs=num_outputs,
        )
        for index in range(len(stream)):
            stream._build(index)  # They are in memory, so a wrong head need not wait for access.
        return stream

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> "TaskStream": ...
    def __getitem__(self, index: int | slice) -> "Task | TaskStream":
        if isinstance(index, slice):
            return replace(self, names=self.names[index], builders=self.builders[index])
        index = range(len(self))[index]
        if index not in self._latest:
            self._latest.clear()  # Before the next is built, so that there are never two.
            self._latest[index] = self._build(index)
        return self._latest[index]

    def _build(self, index: int) -> Task:
        """Build a task, or raise a ValueError if its name or its head is wrong."""
        task = self.builders[index]()
        if task.name != self.names[index]:
            raise ValueError(
                f"task {index} must be built with its name {self.names[index]!r}, got {task.name!r}"
            )
        if task.head >= self.num_heads:
            raise ValueError(
                f"task {task.name!r}: head must be less than num_heads={self.num_heads}, got {task.head}"
            )
        return task


def _return_task(task: Task) -> Task:
    return task
