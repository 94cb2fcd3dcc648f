# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A few rows of a task to keep for later."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyro_radial._pyro.checks import check_types, positive_count, positive_float, random_seed
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.data import check_inputs, num_rows, take

USES = ("labels", "functions")
INPUTS = ("kept", "current")


def random_coreset(x: Tensor, size: int, *, seed: int = 0) -> Tensor:
    """Draw rows at random without replacement.

    :param x: inputs ``[N, ...]``.
    :param size: number of rows to draw, from 1 to N - 1.
    :param seed: seed of the draw.
    :returns: the indices of the rows in ascending order, int64, on the CPU.
    :raises ValueError: naming the argument that does not fit.
    """
    check_types(Tensor, x=x)
    check_inputs(x, "x")
    random_seed("seed", seed, bits=64)
    if positive_count("size", size) >= len(x):
        raise ValueError(f"size must be less than the {len(x)} rows of x, got {size}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(len(x), generator=generator, device="cpu")[:size].sort().values


def split_coreset(data: Pair, index: Tensor) -> tuple[Pair, Pair]:
    """Return the rows of ``index`` in its order, and the other rows in their order."""
    x, y = data
    size = num_rows(x)
    if (
        index.ndim != 1
        or index.is_floating_point()
        or index.is_complex()
        or index.dtype == torch.bool
    ):
        raise ValueError(
            f"index must be integers of shape [M], got {index.dtype} {list(index.shape)}"
        )
    if not 0 < len(index) < size:
        raise ValueError(f"index must hold from 1 to {size - 1} of {size} rows, got {len(index)}")
    if int(index.min()) < 0 or int(index.max()) >= size:
        raise ValueError(
            f"index must be from 0 to {size - 1}, got {int(index.min())} to {int(index.max())}"
        )
    if len(different := index.unique()) != len(index):
        raise ValueError(
            f"index must not hold a row twice, got {len(index)} with {len(different)} different rows"
        )
    index = index.long().cpu()
    is_left = torch.ones(size, dtype=torch.bool, device="cpu").index_fill(0, index, False)
    rest = is_left.nonzero()[:, 0]
    return (take(x, index), take(y, index)), (take(x, rest), take(y, rest))


@dataclass(frozen=True)
class Coreset:
    """How many rows of each task to keep, which ones, and what to use them for.

    With ``use="labels"`` the chain does not learn the kept rows with their task. For a prediction, a copy of the
    posterior is trained on them, used and discarded (Nguyen et al. 2018, *Variational Continual Learning*, section 3
    and algorithm 1).

    With ``use="functions"`` no label is kept. While later tasks are learned, the functions at the kept inputs are held
    where the last posterior had them: see :class:`~pyro_radial.continual.function_memory.FunctionChainELBO`. Its
    ``kl_weight`` is ``weight`` here, and its ``weight_space_kl`` is the ``kl_weight`` of the stream's loss (Rudner et
    al. 2022, *Continual Learning via Sequential Function-Space Variational Inference*). With ``inputs="current"``
    nothing is kept: ``choose`` takes the inputs from the task in training, which learns all its rows.

    :param int size: number of rows of each task.
    :param choose: a function of (x, size, seed=...) that returns their indices, random ones by default, or, for
        functions, inputs of its own ``[M, ...]``, such as noise; a task then learns all its rows. Rows that are spread
        out: ``lambda x, size, seed: torch.tensor(kmeans_plusplus(x.flatten(1).numpy(), size, random_state=seed)[1])``
        with scikit-learn.
    :param Mapping fit_options: options of :func:`~pyro_radial.fit` for the training on labels, if they differ from
        those of a task.
    :param str use: "labels" or "functions".
    :param float weight: weight of the KL of functions, 10 by default.
    :param int max_points: the largest number of kept inputs in one step, 200 by default.
    :param str inputs: "kept" or "current".
    :raises ValueError: naming the argument that does not fit, or that belongs to the other use.

    Example::

        >>> Coreset(200, fit_options={"epochs": 5}).size
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
    inputs: Literal["kept", "current"] = "kept"

    def __post_init__(self) -> None:
        positive_count("size", self.size)
        check_types(Callable, choose=self.choose)
        check_types(Mapping, fit_options=self.fit_options)
        if self.use not in USES:
            raise ValueError(f"use must be one of {USES}, got {self.use!r}")
        allowed = INPUTS if self.use == "functions" else INPUTS[:1]
        if self.inputs not in allowed:
            raise ValueError(
                f"inputs must be one of {allowed} with use={self.use!r}, got {self.inputs!r}"
            )
        if self.use == "labels":
            for name in ("weight", "max_points"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(f"{name} must be left out with use='labels', got {value!r}")
            return
        if self.fit_options:
            raise ValueError(
                "fit_options must be left out with use='functions', because functions are held while later tasks are "
                f"trained, got {sorted(self.fit_options)}"
            )
        weight = 10.0 if self.weight is None else self.weight
        max_points = 200 if self.max_points is None else self.max_points
        object.__setattr__(self, "weight", positive_float("weight", weight))
        object.__setattr__(self, "max_points", positive_count("max_points", max_points))


class _Kept(NamedTuple):
    """What is kept of one task: inputs, with targets if labels are used."""

    head: int
    x: Tensor | None
    y: Tensor | None
    #: The classes of the whole task, without targets that are not classes.
    classes: frozenset[int]


class KeptRows:
    """The coresets of the tasks of a stream, chosen task by task on access."""

    def __init__(self, coreset: Coreset, stream: TaskStream, seed: int) -> None:
        self.coreset, self._stream, self._seed = coreset, stream, seed
        self._kept: dict[int, _Kept] = {}

    def rest(self, number: int) -> Pair:
        """Choose what to keep of a task, and return the rows to learn from."""
        task = self._stream[number]
        x: Tensor | None = None
        y: Tensor | None = None
        rest = task.train
        if self.coreset.inputs == "kept":
            x, y, rest = self._chosen(task)
        targets = task.train[1]
        classes = [] if targets.is_floating_point() else targets.unique().tolist()
        self._kept[number] = _Kept(task.head, x, y, frozenset(classes))
        return rest

    def _chosen(self, task: Task) -> tuple[Tensor, Tensor | None, Pair]:
        """Choose inputs of a task, with targets if labels are used, and return them with the rows to learn from."""
        x = task.train[0]
        size = self.coreset.size
        if size >= num_rows(x):
            raise ValueError(
                f"the size of coreset must be less than the {num_rows(x)} rows of task {task.name!r}, got {size}"
            )
        chosen = self.coreset.choose(x, size, seed=self._seed)
        if self.coreset.use == "labels" or not chosen.is_floating_point():
            (x, y), rest = split_coreset(task.train, chosen)
            return x, y if self.coreset.use == "labels" else None, rest
        if (
            len(chosen) != size
            or chosen.shape[1:] != x.shape[1:]
            or not bool(chosen.isfinite().all())
        ):
            raise ValueError(
                f"choose must return {size} indices or finite inputs of shape {list(x.shape[1:])} for task "
                f"{task.name!r}, got {list(chosen.shape)}"
            )
        return chosen.to(x), None, task.train

    def labeled(self, numbers: range) -> Pair:
        """Return the kept rows of tasks with their labels, one task after another."""
        kept = [self._of(number) for number in numbers]
        x, y = zip(*[(rows.x, rows.y) for rows in kept], strict=True)
        return torch.cat(x), torch.cat(y)

    def inputs_before(self, number: int) -> dict[int, Tensor]:
        """Return the inputs at which functions are held while a task is learned, by the heads of earlier tasks."""
        task: Task = self._stream[number]
        earlier = [self._of(before) for before in range(number)]
        if self.coreset.inputs == "current":
            return dict.fromkeys((kept.head for kept in earlier), self._chosen(task)[0])
        inputs: dict[int, list[Tensor]] = {}
        for kept in earlier:
            assert kept.x is not None
            inputs.setdefault(kept.head, []).append(kept.x)
            if kept.head == task.head and kept.x.shape[1:] != task.train[0].shape[1:]:
                raise ValueError(
                    f"inputs of task {task.name!r} must have the shape of those that coreset keeps under head "
                    f"{task.head}, {list(kept.x.shape[1:])}, got {list(task.train[0].shape[1:])}"
                )
        return {head: torch.cat(parts) for head, parts in inputs.items()}

    def new_classes(self, number: int) -> list[int]:
        """Return the classes of a task that no earlier task under its head had, if there was one."""
        new = self._of(number)
        earlier = [self._of(before) for before in range(number)]
        known = [kept.classes for kept in earlier if kept.head == new.head]
        return sorted(new.classes.difference(*known)) if known else []

    def _of(self, number: int) -> _Kept:
        if number not in self._kept:
            self.rest(number)
        return self._kept[number]
