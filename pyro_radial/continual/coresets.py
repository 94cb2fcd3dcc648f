# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A few rows of a task to keep for later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_radial._pyro.checks import check_types, positive_count, positive_float, random_seed
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.training.data import Rows, check_inputs, num_rows, take

__all__ = ["Coreset", "KeptRows", "k_center_coreset", "random_coreset", "split_coreset"]

USES = ("labels", "functions")


def random_coreset(x: Tensor, size: int, *, seed: int = 0) -> Tensor:
    """Draw rows at random without replacement.

    :param x: inputs ``[N, ...]``.
    :param size: number of rows to draw, from 1 to N - 1.
    :param seed: seed of the draw.
    :returns: the indices of the rows in ascending order, int64, on the CPU.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> random_coreset(torch.rand(10, 2), 3)
        tensor([1, 4, 7])
    """
    _check(x, size, seed)
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:size].sort().values


def k_center_coreset(x: Tensor, size: int, *, seed: int = 0) -> Tensor:
    r"""Choose rows that are spread out: each one is the farthest from those already chosen.

    The first row is drawn at random. The largest distance of any row to its nearest center,

    .. math:: \max_n \min_{c \in C} \lVert x_n - x_c \rVert_2,

    is at most twice the smallest possible with as many rows. The first of equally far rows is taken, and a copy of a
    chosen row only after all other rows. The work is ``size`` passes over ``x``.

    Source: Gonzalez (1985), *Clustering to minimize the maximum intercluster distance*.

    :param x: inputs ``[N, ...]``; the distance is Euclidean over all elements of a row, in float32 or wider.
    :param size: number of rows to choose, from 1 to N - 1.
    :param seed: seed of the first row.
    :returns: the indices of the rows in ascending order, int64, on the CPU.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> k_center_coreset(torch.tensor([[0.0], [0.1], [5.0], [5.1], [9.0]]), 3)
        tensor([0, 2, 4])
    """
    _check(x, size, seed)
    rows = x.detach().reshape(len(x), -1).to(torch.promote_types(x.dtype, torch.float32))
    latest = int(torch.randint(len(x), (), generator=torch.Generator().manual_seed(seed)))
    chosen = [latest]
    nearest = torch.full_like(rows[:, 0], torch.inf)
    while len(chosen) < size:
        # The faster way, by matrix products, rounds: copies of a row would have a distance above zero.
        distance = torch.cdist(rows, rows[latest : latest + 1], compute_mode="donot_use_mm_for_euclid_dist")
        nearest = torch.minimum(nearest, distance[:, 0])
        nearest[latest] = -1.0  # Less than for a copy, which has distance zero.
        latest = int(nearest.argmax())
        chosen.append(latest)
    return torch.tensor(chosen).sort().values


def split_coreset(data: Pair, index: Tensor) -> tuple[Pair, Pair]:
    """Split data into a coreset and the rest.

    :param data: inputs ``[N, ...]`` and targets ``[N, ...]``.
    :param index: the rows of the coreset, as integers.
    :returns: the rows of ``index`` in its order, and the other rows in their order.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> x, y = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([5, 6, 7])
        >>> coreset, rest = split_coreset((x, y), torch.tensor([1]))
        >>> coreset[1], rest[1]
        (tensor([6]), tensor([5, 7]))
    """
    size = len(Rows(data, "data"))
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"index must be integers of shape [M], got {index.dtype} {list(index.shape)}")
    if not 0 < len(index) < size:
        raise ValueError(f"index must hold from 1 to {size - 1} of {size} rows, got {len(index)}")
    if int(index.min()) < 0 or int(index.max()) >= size:
        raise ValueError(f"index must be from 0 to {size - 1}, got {int(index.min())} to {int(index.max())}")
    if len(different := index.unique()) != len(index):
        raise ValueError(f"index must not hold a row twice, got {len(index)} with {len(different)} different rows")
    index = index.long().cpu()
    others = torch.ones(size, dtype=torch.bool)
    others[index] = False
    x, y = data
    rest = others.nonzero()[:, 0]
    return (take(x, index), take(y, index)), (take(x, rest), take(y, rest))


def _check(x: Tensor, size: int, seed: int) -> None:
    """Refuse inputs that are not one tensor, or that have too few rows."""
    check_types(Tensor, x=x)
    check_inputs(x, "x")
    random_seed("seed", seed, bits=64)
    if positive_count("size", size) >= len(x):
        raise ValueError(f"size must be less than the {len(x)} rows of x, got {size}")


@dataclass(frozen=True)
class Coreset:
    """How many rows of each task to keep, which ones, and what to use them for.

    With ``use="labels"`` the chain does not learn the kept rows with their task. For a prediction, a copy of the
    posterior is trained on them, used and discarded (Nguyen et al. 2018, *Variational Continual Learning*, section 3
    and algorithm 1).

    With ``use="functions"`` no label is kept. While later tasks are learned, the functions at the kept inputs are held
    where the last posterior had them: see :class:`~pyro_radial.continual.FunctionChainELBO`. Its ``kl_weight`` is
    ``weight`` here, and its ``weight_space_kl`` is the ``kl_weight`` of the stream's loss (Rudner et al. 2022,
    *Continual Learning via Sequential Function-Space Variational Inference*).

    :param int size: number of rows of each task.
    :param choose: a function of (x, size, seed=...) that returns their indices, such as
        :func:`~pyro_radial.continual.k_center_coreset`.
    :param Mapping fit_options: options of :func:`~pyro_radial.fit` for the training on labels, if they differ from
        those of a task.
    :param str use: "labels" or "functions".
    :param float weight: weight of the KL of functions, 10 by default.
    :param int max_points: the largest number of kept inputs in one step, 200 by default.
    :raises ValueError: naming the argument that does not fit, or that belongs to the other use.

    Example::

        >>> Coreset(200, k_center_coreset, fit_options={"epochs": 5}).size
        200
        >>> Coreset(200, use="functions").weight
        10.0
    """

    size: int
    choose: Callable[..., Tensor] = random_coreset
    fit_options: Mapping[str, Any] = field(default_factory=dict)
    use: Literal["labels", "functions"] = "labels"
    weight: float | None = None
    max_points: int | None = None

    def __post_init__(self) -> None:
        positive_count("size", self.size)
        check_types(Callable, choose=self.choose)
        check_types(Mapping, fit_options=self.fit_options)
        if self.use not in USES:
            raise ValueError(f"use must be one of {USES}, got {self.use!r}")
        of_functions = {"weight": self.weight, "max_points": self.max_points}
        if self.use == "labels":
            for name, value in of_functions.items():
                if value is not None:
                    raise ValueError(f"{name} must be left out with use='labels', got {value!r}")
            return
        if self.fit_options:
            raise ValueError(
                "fit_options must be left out with use='functions', because functions are held while later tasks are "
                f"trained, got {sorted(self.fit_options)}"
            )
        weight, max_points = (10.0 if self.weight is None else self.weight), self.max_points
        object.__setattr__(self, "weight", positive_float("weight", weight))
        points = positive_count("max_points", 200 if max_points is None else max_points)
        object.__setattr__(self, "max_points", points)


class _Kept(NamedTuple):
    """The kept rows of one task; y is None if functions are kept."""

    head: int
    x: Tensor
    y: Tensor | None
    #: The classes of the whole task, without targets that are not classes.
    classes: frozenset[int]


class KeptRows:
    """The coresets of the tasks of a stream, chosen task by task on access."""

    def __init__(self, coreset: Coreset, stream: TaskStream, seed: int) -> None:
        self.coreset, self._stream, self._seed = coreset, stream, seed
        self._kept: dict[int, _Kept] = {}

    def rest(self, number: int) -> Pair:
        """Choose the rows of a task to keep, and return the others."""
        task, size = self._stream[number], self.coreset.size
        if size >= num_rows(task.train[0]):
            raise ValueError(
                f"the size of coreset must be less than the {num_rows(task.train[0])} rows of task {task.name!r}, "
                f"got {size}"
            )
        (x, y), rest = split_coreset(task.train, self.coreset.choose(task.train[0], size, seed=self._seed))
        classes = frozenset(() if task.train[1].is_floating_point() else task.train[1].unique().tolist())
        self._kept[number] = _Kept(task.head, x, y if self.coreset.use == "labels" else None, classes)
        return rest

    def labeled(self, numbers: range) -> Pair:
        """Return the kept rows of tasks with their labels, one task after another."""
        kept = [self._of(number) for number in numbers]
        return torch.cat([rows.x for rows in kept]), torch.cat([rows.y for rows in kept if rows.y is not None])

    def inputs_before(self, number: int) -> dict[int, Tensor]:
        """Return the kept inputs of all tasks before one, by head."""
        task: Task = self._stream[number]
        inputs: dict[int, list[Tensor]] = {}
        for kept in map(self._of, range(number)):
            inputs.setdefault(kept.head, []).append(kept.x)
            if kept.head == task.head and kept.x.shape[1:] != task.train[0].shape[1:]:
                raise ValueError(
                    f"inputs of task {task.name!r} must have the shape of those that coreset keeps under head "
                    f"{task.head}, {list(kept.x.shape[1:])}, got {list(task.train[0].shape[1:])}"
                )
        return {head: torch.cat(parts) for head, parts in inputs.items()}

    def new_classes(self, number: int) -> list[int]:
        """Return the classes of a task that no earlier task under its head had, if there was one."""
        before = [kept.classes for kept in map(self._of, range(number)) if kept.head == self._stream[number].head]
        return sorted(self._of(number).classes.difference(*before)) if before else []

    def _of(self, number: int) -> _Kept:
        if number not in self._kept:
            self.rest(number)
        return self._kept[number]
