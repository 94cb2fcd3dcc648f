# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A few rows of a task to keep for later."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_choice, positive_count, positive_float, random_seed
from pyro_radial.continual.streams import Pair, Task
from pyro_radial.infer.data import check_inputs, num_rows, take

#: What a coreset keeps of a task, in words, by its use and its inputs.
KINDS = {
    ("labels", "kept"): "rows with labels",
    ("functions", "kept"): "inputs",
    ("functions", "current"): "the head alone",
}


def random_coreset(x: Tensor, size: int, *, seed: int = 0) -> Tensor:
    """Draw rows at random without replacement.

    :param x: inputs ``[N, ...]``.
    :param size: number of rows to draw, from 1 to N - 1.
    :param seed: seed of the draw.
    :returns: the indices of the rows in ascending order, int64, on the CPU.
    :raises ValueError: naming the argument that does not fit.
    """
    check_inputs(x, "x")
    generator = torch.Generator().manual_seed(random_seed("seed", seed, bits=64))
    if positive_count("size", size) >= len(x):
        raise ValueError(f"size must be less than the {len(x)} rows of x, got {size}")
    return torch.randperm(len(x), generator=generator, device="cpu")[:size].sort().values


def split_coreset(data: Pair, index: Tensor) -> tuple[Tensor, Tensor, Pair]:
    """Return inputs and targets of the rows of ``index`` in its order, and the other rows in their order."""
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
    index = index.long().cpu()
    rows = set(index.tolist())
    if not 0 < len(index) < size or len(rows) < len(index) or not rows <= set(range(size)):
        raise ValueError(
            f"index must hold from 1 to {size - 1} of {size} rows, each once and from 0 to {size - 1}, got "
            f"{len(index)} with {len(rows)} different rows from {min(rows, default=0)} to {max(rows, default=0)}"
        )
    is_other = torch.ones(size, dtype=torch.bool, device="cpu").index_fill(0, index, False)
    other_index = is_other.nonzero()[:, 0]
    return take(x, index), take(y, index), (take(x, other_index), take(y, other_index))


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

    :param int size: number of rows of each task; with ``inputs="current"`` the most.
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
        check_choice("use", self.use, ("labels", "functions"))
        inputs = ("kept", "current") if self.use == "functions" else ("kept",)
        check_choice(f"with use={self.use!r} inputs", self.inputs, inputs)
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


class StoredCoreset(nn.Module):
    """What is kept of a task: its head, and inputs and targets, which have no rows if they are not kept."""

    head: Tensor
    x: Tensor
    y: Tensor

    def __init__(self, head: Tensor, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.register_buffer("head", head)
        self.register_buffer("x", x)
        self.register_buffer("y", y)

    @property
    def kind(self) -> str:
        """What is kept, in words."""
        if len(self.y):
            return "rows with labels"
        return "inputs" if len(self.x) else "the head alone"


class StoredCoresets(nn.ModuleList):
    """What a chain keeps of its tasks, in their order. Loading a state adds and removes tasks to match the state."""

    @property
    def tasks(self) -> list[StoredCoreset]:
        """What is kept of each task."""
        return cast(list[StoredCoreset], list(self))

    def labeled(self, numbers: slice) -> Pair:
        """Return the kept rows of tasks with their labels, one task after another."""
        coresets = self.tasks[numbers]
        return torch.cat([stored.x for stored in coresets]), torch.cat(
            [stored.y for stored in coresets]
        )

    def inputs_by_head(self, task: Task) -> dict[int, Tensor]:
        """Return the kept inputs by the heads of their tasks; those under the head of ``task`` must be like its own."""
        inputs: dict[int, list[Tensor]] = {}
        for coreset in self.tasks:
            head = int(coreset.head)
            inputs.setdefault(head, []).append(coreset.x)
            if head == task.head and coreset.x.shape[1:] != task.train[0].shape[1:]:
                raise ValueError(
                    f"inputs of task {task.name!r} must have the shape of those that coreset keeps under head "
                    f"{task.head}, {list(coreset.x.shape[1:])}, got {list(task.train[0].shape[1:])}"
                )
        return {head: torch.cat(of_tasks) for head, of_tasks in inputs.items()}

    def check(self, coreset: Coreset | None, learned: Sequence[str]) -> None:
        """Raise a ValueError that names a task of which something else is kept than a coreset keeps."""
        kind = "nothing" if coreset is None else KINDS[coreset.use, coreset.inputs]
        for number, name in enumerate(learned):
            stored_kind = self.tasks[number].kind if number < len(self) else "nothing"
            if stored_kind != kind:
                raise ValueError(
                    f"coreset must keep {stored_kind}, as the chain does of task {name!r}, got {kind}"
                )
        if len(self) > len(learned):
            raise ValueError(
                f"after must be the matrix of the {len(self)} tasks of which the chain keeps "
                f"{self.tasks[-1].kind}, got one of {len(learned)} tasks; for other tasks make a new chain"
            )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *args: object, **kwargs: object
    ) -> None:
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            if key.startswith(prefix):
                number, _, name = key[len(prefix) :].partition(".")
                saved.setdefault(number, {})[name] = torch.empty_like(tensor)
        del self[:]
        for number in sorted(saved, key=int):
            self.append(StoredCoreset(**saved[number]))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def store_coreset(coreset: Coreset, task: Task, seed: int) -> tuple[StoredCoreset, Pair]:
    """Choose what to keep of a task, and return it with the rows to learn from."""
    x, y = task.train
    rows = task.train
    if coreset.inputs == "kept":
        x, y, rows = choose_inputs(coreset, task, seed)
    else:
        x = x[:0]
    if coreset.use == "functions":
        y = y[:0]
    return StoredCoreset(torch.tensor(task.head), x.detach().clone(), y.clone()), rows


def choose_inputs(coreset: Coreset, task: Task, seed: int) -> tuple[Tensor, Tensor, Pair]:
    """Choose inputs of a task, and return them, with their targets if they are rows, and the rows to learn from."""
    x, y = task.train
    if coreset.size >= num_rows(x):
        raise ValueError(
            f"the size of coreset must be less than the {num_rows(x)} rows of task {task.name!r}, got {coreset.size}"
        )
    choice = coreset.choose(x, coreset.size, seed=seed)
    if coreset.use == "labels" or not choice.is_floating_point():
        return split_coreset(task.train, choice)
    if choice.shape != (coreset.size, *x.shape[1:]) or not bool(choice.isfinite().all()):
        raise ValueError(
            f"choose must return {coreset.size} indices or finite inputs of shape {list(x.shape[1:])} for task "
            f"{task.name!r}, got {list(choice.shape)}"
        )
    return choice.to(x), y[:0], task.train
