# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A few rows that stand for all: what to keep of a task for later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial.continual.streams import Pair
from pyro_radial.infer.training.data import Rows, check_inputs, take

__all__ = ["Coreset", "k_center_coreset", "random_coreset", "split_coreset"]

USES = ("labels", "functions")


def random_coreset(x: Tensor, size: int, *, seed: int = 0) -> Tensor:
    """Rows drawn at random without replacement.

    :param x: inputs ``[N, ...]``.
    :param size: number of rows to draw, from 1 to N - 1.
    :param seed: seed of the draw.
    :returns: the indices of the rows in ascending order, int64, on the CPU.
    :raises ValueError: if an argument does not fit; the message names it.

    Example::

        >>> random_coreset(torch.rand(10, 2), 3)
        tensor([1, 4, 7])
    """
    _check(x, size)
    return torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:size].sort().values


def k_center_coreset(x: Tensor, size: int, *, seed: int = 0) -> Tensor:
    r"""Rows that are spread out: each next one is the farthest from those already chosen.

    The first row is drawn at random. The largest distance of any row to its nearest center,

    .. math:: \max_n \min_{c \in C} \lVert x_n - x_c \rVert_2,

    is then at most twice the smallest that any choice of as many rows has. Of rows equally far the first is taken,
    and a copy of a chosen row only after all rows that differ. The work is ``size`` passes over ``x``, and memory
    beyond ``x`` is a few numbers per row.

    Source: Gonzalez (1985), *Clustering to minimize the maximum intercluster distance*.

    :param x: inputs ``[N, ...]``, whose distance is Euclidean over all elements of a row, in float32 at least.
    :param size: number of rows to choose, from 1 to N - 1.
    :param seed: seed of the first row.
    :returns: the indices of the rows in ascending order, int64, on the CPU.
    :raises ValueError: if an argument does not fit; the message names it.

    Example::

        >>> k_center_coreset(torch.tensor([[0.0], [0.1], [5.0], [5.1], [9.0]]), 3)
        tensor([0, 2, 4])
    """
    _check(x, size)
    rows = x.detach().reshape(len(x), -1).to(torch.promote_types(x.dtype, torch.float32))
    latest = int(torch.randint(len(x), (), generator=torch.Generator().manual_seed(seed)))
    chosen = [latest]
    nearest = torch.full_like(rows[:, 0], torch.inf)
    while len(chosen) < size:
        nearest = torch.minimum(nearest, _distance(rows, latest))
        nearest[latest] = -1.0  # Below a copy of it, which is at distance zero.
        latest = int(nearest.argmax())
        chosen.append(latest)
    return torch.tensor(chosen).sort().values


def split_coreset(data: Pair, index: Tensor) -> tuple[Pair, Pair]:
    """Split data in a coreset and the rest.

    :param data: inputs ``[N, ...]`` and targets ``[N, ...]``.
    :param index: which rows are the coreset, as integers.
    :returns: the rows of ``index`` in its order, and the others in theirs.
    :raises ValueError: if an argument does not fit; the message names it.

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


def _distance(rows: Tensor, center: int) -> Tensor:
    """The distance of every row from one of them."""
    # The faster way by matrix products rounds: it places copies of a row at a distance above zero.
    return torch.cdist(rows, rows[center : center + 1], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]


def _check(x: Tensor, size: int) -> None:
    """A tensor of more rows than the size asks for, or a ValueError that names the argument."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {type(x).__name__}")
    check_inputs(x, "x")
    if positive_count("size", size) >= len(x):
        raise ValueError(f"size must be less than the {len(x)} rows of x, got {size}")


@dataclass(frozen=True)
class Coreset:
    """Rows of each task that are kept from its training, to remember it by.

    With ``use="labels"`` they are learned just before each prediction: the chain learns the rest of each task's rows;
    to predict, a copy of the posterior and of the model's own parameters is trained on the kept rows, used and thrown
    away (Nguyen et al. 2018, *Variational Continual Learning*, section 3 and algorithm 1).

    With ``use="functions"`` no label is kept. While a later task is learned, the functions at the kept inputs are held
    where they were after the task before: see :class:`~pyro_radial.continual.FunctionChainELBO`, whose ``kl_weight`` is
    ``weight`` here, and whose ``weight_space_kl`` is the ``kl_weight`` of the loss that the stream is learned with.
    Under several heads each row has its own task's, whose parameters are trained on (Rudner et al. 2022, *Continual
    Learning via Sequential Function-Space Variational Inference*).

    :param int size: rows of each task.
    :param choose: a function of (x, size, seed=...) that returns their indices, such as
        :func:`~pyro_radial.continual.k_center_coreset`.
    :param Mapping fit_options: of the training on labels, where they differ from those of a task.
    :param str use: "labels" or "functions".
    :param float weight: of the KL of functions, by default 10.
    :param int max_points: the most kept inputs in one step, by default 200.
    :raises ValueError: naming the argument that does not fit, or is of the other use.

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
        positive_count("Coreset: size", self.size)
        if self.use not in USES:
            raise ValueError(f"Coreset: use must be one of {USES}, got {self.use!r}")
        of_functions = {"weight": self.weight, "max_points": self.max_points}
        if self.use == "labels":
            for name, value in of_functions.items():
                if value is not None:
                    raise ValueError(f"Coreset: {name} must be left out with use='labels', got {value!r}")
            return
        if self.fit_options:
            raise ValueError(
                "Coreset: fit_options must be left out with use='functions', which take part in the training of later "
                f"tasks and have none of their own, got {sorted(self.fit_options)}"
            )
        # Frozen for everyone else.
        weight, max_points = (10.0 if self.weight is None else self.weight), self.max_points
        object.__setattr__(self, "weight", positive_float("Coreset: weight", weight))
        points = positive_count("Coreset: max_points", 200 if max_points is None else max_points)
        object.__setattr__(self, "max_points", points)
