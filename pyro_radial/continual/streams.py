# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Streams of classification tasks, and the two standard ones: split and permuted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import overload

import torch
from torch import Tensor

from pyro_radial._pyro.checks import (
    check_flag,
    check_items,
    check_number,
    check_types,
    non_negative_integer,
    positive_count,
    random_seed,
)
from pyro_radial.infer.data import Rows

__all__ = ["Pair", "Task", "TaskStream", "class_split_stream", "permuted_stream"]

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
        check_types(str, name=self.name)
        for part, data in (("train", self.train), ("test", self.test), ("validation", self.validation)):
            if data is not None or part != "validation":
                object.__setattr__(self, part, _tensors(data, f"task {self.name!r}: {part}"))
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
        object.__setattr__(self, "names", tuple(check_items(str, "names", self.names)))
        object.__setattr__(self, "builders", tuple(check_items(Callable, "builders", self.builders)))
        if not self.names:
            raise ValueError("names must hold at least one task, got none")
        if len(self.names) != len(self.builders):
            raise ValueError(f"builders must be {len(self.names)}, one per name, got {len(self.builders)}")
        positive_count("num_heads", self.num_heads)
        positive_count("num_outputs", self.num_outputs)

    @classmethod
    def of(cls, tasks: Sequence[Task], *, num_outputs: int, num_heads: int = 1) -> TaskStream:
        """Make a stream of tasks in memory.

        :param tasks: the tasks in order.
        :param num_outputs: number of outputs of each head.
        :param num_heads: number of output heads.
        :returns: the stream.
        :raises ValueError: naming the argument, or the task whose head is not among ``num_heads``.
        """
        if not check_items(Task, "tasks", tasks):
            raise ValueError("tasks must hold at least one task, got none")
        builders = tuple(partial(_returned, task) for task in tasks)
        stream = cls(tuple(task.name for task in tasks), builders, num_heads=num_heads, num_outputs=num_outputs)
        for index in range(len(stream)):
            stream._build(index)  # They are in memory, so a wrong head need not wait for access.
        return stream

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
        check_types(Task, **{f"builders[{index}]()": task})
        if task.name != self.names[index]:
            raise ValueError(f"task {index} must be built with its name {self.names[index]!r}, got {task.name!r}")
        if task.head >= self.num_heads:
            raise ValueError(f"task {task.name!r}: head must be less than num_heads={self.num_heads}, got {task.head}")
        return task


def class_split_stream(
    train: Pair,
    test: Pair,
    *,
    classes_per_task: int = 2,
    multi_head: bool = True,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> TaskStream:
    """Split a data set into tasks of a few classes each, in ascending order.

    With several heads, every task has its own, and its labels count the classes of the task from zero. With a single
    head, the labels stay the same. For another order, number the classes in that order.

    Source: Zenke, Poole and Ganguli (2017), *Continual Learning Through Synaptic Intelligence*, on split MNIST.

    :param train: inputs ``[N, ...]`` and integer labels ``[N]``; NumPy arrays are converted, as in :class:`Task`.
    :param test: inputs and labels to measure on.
    :param classes_per_task: number of classes of a task.
    :param multi_head: whether each task has its own head.
    :param validation_fraction: share of the training rows to hold out. They are drawn from all rows before the split,
        so they do not depend on the tasks. The others keep their order.
    :param seed: seed of the validation rows.
    :returns: the stream; ``num_outputs`` is the number of classes of a task, or with a single head the largest label
        plus one.
    :raises ValueError: naming the argument that does not fit the data.

    Example::

        >>> x, y = torch.rand(6, 3), torch.tensor([0, 3, 1, 2, 3, 0])
        >>> stream = class_split_stream((x, y), (x, y))
        >>> [(task.name, task.head, task.train[1].tolist()) for task in stream]
        [('classes 0, 1', 0, [0, 1, 0]), ('classes 2, 3', 1, [1, 0, 1])]
        >>> class_split_stream((x, y), (x, y), multi_head=False)[1].train[1]
        tensor([3, 2, 3])
    """
    train, test = _labeled(train, "train"), _labeled(test, "test")
    positive_count("classes_per_task", classes_per_task)
    check_flag("multi_head", multi_head)
    present = torch.cat([y.unique().cpu() for _, y in (train, test)]).unique()
    classes = [group.tolist() for group in present.split(classes_per_task)]
    for name, (_, y) in {"train": train, "test": test}.items():
        if missing := sorted({*present.tolist()} - {*y.unique().tolist()}):
            raise ValueError(f"{name}: y must hold every class, got no row of class {missing[0]}")
    if multi_head and len(classes[0]) > len(classes[-1]):
        raise ValueError(f"classes_per_task must divide the {len(present)} classes of heads, got {classes_per_task}")
    learned, held_out = _hold_out(train, validation_fraction, seed)
    tasks = [
        Task(
            name="classes " + ", ".join(str(int(label)) for label in group),
            train=_only(learned, group, multi_head),
            test=_only(test, group, multi_head),
            validation=None if held_out is None else _only(held_out, group, multi_head),
            head=number if multi_head else 0,
        )
        for number, group in enumerate(classes)
    ]
    num_outputs = len(classes[0]) if multi_head else _num_classes(train, test)
    return TaskStream.of(tasks, num_heads=len(tasks) if multi_head else 1, num_outputs=num_outputs)


def permuted_stream(
    train: Pair,
    test: Pair,
    num_tasks: int,
    *,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> TaskStream:
    """Make tasks with the same labels, each with the elements of its inputs in another fixed order.

    The first task has the inputs as they are. All tasks share one head. Inputs keep their shape: an image ``[C, H, W]``
    is permuted over all its elements.

    Source: Goodfellow et al. (2013), *An Empirical Investigation of Catastrophic Forgetting in Gradient-Based Neural
    Networks*; Kirkpatrick et al. (2017), *Overcoming catastrophic forgetting in neural networks*.

    :param train: inputs ``[N, ...]`` and integer labels ``[N]``; NumPy arrays are converted, as in :class:`Task`.
    :param test: inputs of the same shape and labels to measure on.
    :param num_tasks: number of tasks; the tasks of a shorter stream are the first of a longer one.
    :param validation_fraction: share of the training rows to hold out, the same rows in every task. The others keep
        their order.
    :param seed: seed of the permutations and of the validation rows.
    :returns: the stream; ``num_outputs`` is the largest label plus one.
    :raises ValueError: naming the argument that does not fit the data.

    Example::

        >>> x, y = torch.arange(8.0).reshape(2, 4), torch.tensor([0, 1])
        >>> stream = permuted_stream((x, y), (x, y), num_tasks=2)
        >>> stream[0].train[0].equal(x), stream[1].train[0].equal(x)
        (True, False)
        >>> stream[1].train[0].sort(1).values.equal(x)
        True
    """
    train, test = _labeled(train, "train"), _labeled(test, "test")
    positive_count("num_tasks", num_tasks)
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = list(train[0].shape[1:]), list(test[0].shape[1:])
        raise ValueError(f"test: inputs must have the same shape as in train, {shapes[0]}, got {shapes[1]}")
    learned, held_out = _hold_out(train, validation_fraction, seed)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(train[0][0].numel(), generator=generator, device="cpu") for _ in range(num_tasks)]
    orders[0] = torch.arange(len(orders[0]), device="cpu")
    names = tuple(f"permutation {number + 1}" for number in range(num_tasks))
    builders = tuple(
        partial(_permuted_task, name, order, learned, test, held_out) for name, order in zip(names, orders, strict=True)
    )
    return TaskStream(names, builders, num_heads=1, num_outputs=_num_classes(train, test))


def _tensors(data: object, name: str) -> Pair:
    """The inputs and targets as tensors, or a ValueError that names the argument."""
    rows = Rows(data, name)
    if rows.dataset is not None:
        raise ValueError(f"{name} must be a pair (x, y) of tensors, got {type(rows.dataset).__name__}")
    return rows.tensors  # type: ignore[return-value]


def _returned(task: Task) -> Task:
    return task


def _permuted_task(name: str, order: Tensor, train: Pair, test: Pair, validation: Pair | None) -> Task:
    held_out = None if validation is None else _permute(validation, order)
    return Task(name, _permute(train, order), _permute(test, order), held_out)


def _permute(data: Pair, order: Tensor) -> Pair:
    """The pair with the elements of each input in this order."""
    x, y = data
    return x.reshape(len(x), -1)[:, order.to(x.device)].reshape(x.shape), y


def _only(data: Pair, group: Sequence[int], renumber: bool) -> Pair:
    """The rows of these classes in their order, with labels that count the classes of the group if asked."""
    x, y = data
    position = y[:, None] == torch.tensor(group, device=y.device)
    chosen = position.any(1)
    return x[chosen.to(x.device)], position.int().argmax(1)[chosen] if renumber else y[chosen].long()


def _hold_out(data: Pair, fraction: float, seed: int) -> tuple[Pair, Pair | None]:
    """The rows to learn from, and a random part of them that is held out, both in their order."""
    check_number("validation_fraction", fraction, lambda share: 0 <= share < 1, "in [0, 1)")
    random_seed("seed", seed, bits=64)
    x, y = data
    if fraction == 0:
        return data, None
    count = round(fraction * len(x))
    if count in (0, len(x)):
        raise ValueError(
            f"validation_fraction must leave rows in both parts, got {fraction}, which holds out {count} of {len(x)}"
        )
    held_out = torch.zeros(len(x), dtype=torch.bool, device="cpu")
    held_out[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")[:count]] = True
    at_x, at_y = held_out.to(x.device), held_out.to(y.device)
    return (x[~at_x], y[~at_y]), (x[at_x], y[at_y])


def _num_classes(*pairs: Pair) -> int:
    return max(int(y.max()) for _, y in pairs) + 1


def _labeled(data: object, name: str) -> Pair:
    """One tensor of inputs and one of labels, or a ValueError that names the argument."""
    x, y = _tensors(data, name)
    check_types(Tensor, **{f"{name}: x": x})
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{name}: y must be integer labels of shape [{len(x)}], got {y.dtype} {list(y.shape)}")
    if int(y.min()) < 0:
        raise ValueError(f"{name}: y must be non-negative, got {int(y.min())}")
    return x, y
