# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The two standard streams of the field, made from one data set of classes: split and permuted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.training.data import Rows

__all__ = ["class_split_stream", "permuted_stream"]


def class_split_stream(
    train: Pair,
    test: Pair,
    *,
    classes: Sequence[Sequence[int]] | None = None,
    classes_per_task: int = 2,
    multi_head: bool = True,
    validation_fraction: float = 0.0,
    seed: int = 0,
) -> TaskStream:
    """Tasks of a few classes each.

    With several heads every task has its own, and the labels count the classes of the task from zero in the order of
    its group: a test says which task it is from. With a single head the labels stay as they are.

    Source: Zenke, Poole and Ganguli (2017), *Continual Learning Through Synaptic Intelligence*, on split MNIST.

    :param train: inputs ``[N, ...]`` and integer labels ``[N]``.
    :param test: as ``train``.
    :param classes: the classes of each task; rows of a class in no group are left out. By default consecutive classes
        in ascending order, ``classes_per_task`` of them per task.
    :param classes_per_task: number of classes of a task, unless ``classes`` is given.
    :param multi_head: whether each task has its own head.
    :param validation_fraction: part of the training rows to hold out. They are drawn once from all rows, before the
        split, so that they do not depend on the tasks. The others keep their order.
    :param seed: seed of the validation rows.
    :returns: the stream; ``num_outputs`` is the number of classes of a task, or of a single head the largest label
        plus one.
    :raises ValueError: if an argument does not fit the data; the message names it.

    Example::

        >>> x, y = torch.rand(6, 3), torch.tensor([0, 3, 1, 2, 3, 0])
        >>> stream = class_split_stream((x, y), (x, y))
        >>> [(task.name, task.head, task.train[1].tolist()) for task in stream]
        [('classes 0, 1', 0, [0, 1, 0]), ('classes 2, 3', 1, [1, 0, 1])]
        >>> class_split_stream((x, y), (x, y), multi_head=False)[1].train[1]
        tensor([3, 2, 3])
    """
    labels = [_check_labels(train, "train"), _check_labels(test, "test")]
    positive_count("classes_per_task", classes_per_task)
    if classes is None:
        present = torch.cat([part.unique().cpu() for part in labels]).unique()
        classes = [group.tolist() for group in present.split(classes_per_task)]
    _check_groups(classes, labels, multi_head)
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
    num_outputs = len(classes[0]) if multi_head else _num_classes(labels)
    return TaskStream.of(tasks, num_heads=len(tasks) if multi_head else 1, num_outputs=num_outputs)


def permuted_stream(
    train: Pair,
    test: Pair,
    num_tasks: int,
    *,
    validation_fraction: float = 0.0,
    seed: int = 0,
    identity_first: bool = True,
) -> TaskStream:
    """Tasks with the same labels, each with the elements of its inputs in another fixed order.

    All tasks share one head. An input keeps its shape: an image of shape ``[C, H, W]`` is permuted over all its
    elements. Tasks are built when they are asked for.

    Source: Goodfellow et al. (2013), *An Empirical Investigation of Catastrophic Forgetting in Gradient-Based Neural
    Networks*; Kirkpatrick et al. (2017), *Overcoming catastrophic forgetting in neural networks*.

    :param train: inputs ``[N, ...]`` and integer labels ``[N]``.
    :param test: as ``train``, with inputs of the same shape.
    :param num_tasks: number of tasks; the tasks of a shorter stream are the first of a longer one.
    :param validation_fraction: part of the training rows to hold out, the same rows in every task. The others keep
        their order.
    :param seed: seed of the permutations and of the validation rows.
    :param identity_first: whether the first task has the inputs as they are.
    :returns: the stream; ``num_outputs`` is the largest label plus one.
    :raises ValueError: if an argument does not fit the data; the message names it.

    Example::

        >>> x, y = torch.arange(8.0).reshape(2, 4), torch.tensor([0, 1])
        >>> stream = permuted_stream((x, y), (x, y), num_tasks=2)
        >>> stream[0].train[0].equal(x), stream[1].train[0].equal(x)
        (True, False)
        >>> stream[1].train[0].sort(1).values.equal(x)
        True
    """
    labels = [_check_labels(train, "train"), _check_labels(test, "test")]
    positive_count("num_tasks", num_tasks)
    if train[0].shape[1:] != test[0].shape[1:]:
        shapes = list(train[0].shape[1:]), list(test[0].shape[1:])
        raise ValueError(f"test: inputs must have the shape of those of train, {shapes[0]}, got {shapes[1]}")
    learned, held_out = _hold_out(train, validation_fraction, seed)
    generator = torch.Generator().manual_seed(seed)
    # Drawn also where the identity takes its place, so that the other tasks do not depend on that.
    orders = [torch.randperm(train[0][0].numel(), generator=generator) for _ in range(num_tasks)]
    if identity_first:
        orders[0] = torch.arange(len(orders[0]))
    names = tuple(f"permutation {number + 1}" for number in range(num_tasks))
    builders = tuple(
        partial(_permuted_task, name, order, learned, test, held_out) for name, order in zip(names, orders, strict=True)
    )
    return TaskStream(names, builders, num_heads=1, num_outputs=_num_classes(labels))


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
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction must be in [0, 1), got {fraction}")
    x, y = data
    if fraction == 0:
        return data, None
    count = round(fraction * len(x))
    if count in (0, len(x)):
        raise ValueError(
            f"validation_fraction must leave rows in both parts, got {fraction}, which holds out {count} of {len(x)}"
        )
    held_out = torch.zeros(len(x), dtype=torch.bool)
    held_out[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:count]] = True
    at_x, at_y = held_out.to(x.device), held_out.to(y.device)
    return (x[~at_x], y[~at_y]), (x[at_x], y[at_y])


def _num_classes(labels: Sequence[Tensor]) -> int:
    return max(int(part.max()) for part in labels) + 1


def _check_labels(data: Pair, name: str) -> Tensor:
    """The labels of a pair of one tensor of inputs and labels, or a ValueError that names the argument."""
    Rows(data, name)
    x, y = data
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: x must be one tensor, got {type(x).__name__}")
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{name}: y must be integer labels of shape [{len(x)}], got {y.dtype} {list(y.shape)}")
    if int(y.min()) < 0:
        raise ValueError(f"{name}: y must be non-negative, got {int(y.min())}")
    return y


def _check_groups(classes: Sequence[Sequence[int]], labels: Sequence[Tensor], same_size: bool) -> None:
    """Groups of classes that have rows, none twice, or a ValueError."""
    if not classes or not all(len(group) for group in classes):
        raise ValueError(f"classes must be groups of at least one class, got {classes!r}")
    wanted = [label for group in classes for label in group]
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"classes must not overlap, got {classes!r}")
    for name, part in zip(("train", "test"), labels, strict=True):
        if missing := sorted(set(wanted) - set(part.unique().tolist())):
            raise ValueError(f"{name}: y must hold every class of classes, got no row of class {missing[0]}")
    if same_size and len({len(group) for group in classes}) > 1:
        sizes = [len(group) for group in classes]
        raise ValueError(f"classes must be groups of one size where each task has its own head, got sizes {sizes}")
