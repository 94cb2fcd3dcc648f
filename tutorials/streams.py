# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The two standard streams of classification tasks: split and permuted."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pyro_radial.continual import Task, TaskStream

Pair = tuple[Tensor, Tensor]


def class_split_stream(
    train: Pair, test: Pair, *, classes_per_task: int = 2, multi_head: bool = True, validation_fraction: float = 0.0
) -> TaskStream:
    """Split rows and integer labels into tasks of a few classes each, in ascending order.

    With several heads every task has its own, and its labels count the classes of the task from zero; with one head
    labels stay as they are. A part of the training rows, drawn before the split, is held out.

    Source: Zenke, Poole and Ganguli (2017), *Continual Learning Through Synaptic Intelligence*, on split MNIST.
    """
    present = torch.cat([train[1], test[1]]).unique()
    if multi_head and len(present) % classes_per_task:
        raise ValueError(f"classes_per_task must divide the {len(present)} classes of heads, got {classes_per_task}")
    learned, held_out = hold_out(train, validation_fraction)
    tasks = [
        Task(
            "classes " + ", ".join(map(str, group)),
            of_classes(learned, group, multi_head),
            of_classes(test, group, multi_head),
            None if held_out is None else of_classes(held_out, group, multi_head),
            head=number if multi_head else 0,
        )
        for number, group in enumerate(group.tolist() for group in present.split(classes_per_task))
    ]
    if multi_head:
        return TaskStream.of(tasks, num_heads=len(tasks), num_outputs=classes_per_task)
    return TaskStream.of(tasks, num_outputs=int(present.max()) + 1)


def permuted_stream(train: Pair, test: Pair, num_tasks: int, *, validation_fraction: float = 0.0) -> TaskStream:
    """Make tasks with the same labels, each with the elements of its inputs in another fixed order; the first as it is.

    Tasks are built on access, since each is a copy of all inputs.

    Source: Goodfellow et al. (2013), *An Empirical Investigation of Catastrophic Forgetting in Gradient-Based Neural
    Networks*; Kirkpatrick et al. (2017), *Overcoming catastrophic forgetting in neural networks*.
    """
    learned, held_out = hold_out(train, validation_fraction)
    size, generator = train[0][0].numel(), torch.Generator().manual_seed(0)
    orders = [torch.randperm(size, generator=generator) for _ in range(num_tasks)]
    orders[0] = torch.arange(size)
    names = tuple(f"permutation {number + 1}" for number in range(num_tasks))
    builders = tuple(
        partial(permuted_task, name, order, learned, test, held_out) for name, order in zip(names, orders, strict=True)
    )
    labels = torch.cat([train[1], test[1]])
    return TaskStream(names, builders, num_heads=1, num_outputs=int(labels.max()) + 1)


def permuted_task(name: str, order: Tensor, *parts: Pair | None) -> Task:
    """Training, test and validation rows with the elements of each input in an order."""
    return Task(
        name,
        *(part and (part[0].flatten(1)[:, order].view_as(part[0]), part[1]) for part in parts),  # type: ignore[arg-type]
    )


def of_classes(data: Pair, group: Sequence[int], renumber: bool) -> Pair:
    """The rows of some classes in their order, with labels that count these classes if asked."""
    x, y = data
    position = y[:, None] == torch.tensor(group)
    chosen = position.any(1)
    return x[chosen], position.int().argmax(1)[chosen] if renumber else y[chosen]


def hold_out(data: Pair, fraction: float) -> tuple[Pair, Pair | None]:
    """The rows to learn from, and a random part of them that is held out, both in their order."""
    x, y = data
    if not fraction:
        return data, None
    held_out = torch.zeros(len(x), dtype=torch.bool)
    held_out[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: round(fraction * len(x))]] = True
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
