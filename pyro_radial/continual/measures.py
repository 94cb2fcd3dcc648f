# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How well a sequence of tasks was learned and remembered."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class AccuracyMatrix:
    r"""Test accuracy on each task after learning each task, and the measures that follow from it.

    In the formulas :math:`R_{i,j}` is ``values[i, j]``, :math:`b_j` is ``baseline[j]`` and :math:`T` is the number of
    tasks; tasks count from zero.

    Source: Lopez-Paz and Ranzato (2017), *Gradient Episodic Memory for Continual Learning*, section 2.

    :param values: accuracy on task j after learning tasks 0 to i as entry ``[i, j]``, shape ``[T, T]``. The row of a
        task that is not learned is all NaN. In other rows, only entries above the diagonal can be NaN.
    :param names: one name per task.
    :param baseline: accuracy of an untrained model on each task, shape ``[T]``, NaN where not measured.

    Example::

        >>> nan = float("nan")
        >>> matrix = AccuracyMatrix(torch.tensor([[0.9, nan], [0.6, 0.8]]), ("first", "second"))
        >>> f"{matrix.average_accuracy:.2f} {matrix.backward_transfer:.2f} {matrix.forgetting:.2f}"
        '0.70 -0.30 0.30'
    """

    values: Tensor
    names: tuple[str, ...]
    baseline: Tensor | None = None

    @classmethod
    def empty(cls, names: Sequence[str]) -> "AccuracyMatrix":
        """Make the matrix before any task is learned.

        :param names: one name per task.
        :returns: a matrix of NaN.

        Example::

            >>> matrix = AccuracyMatrix.empty(["first", "second"]).with_row(0, [0.9]).with_row(1, [0.6, 0.8])
            >>> matrix.learned
            tensor([0.9000, 0.8000], dtype=torch.float64)
        """
        return cls(
            torch.full((len(names), len(names)), math.nan, dtype=torch.float64), tuple(names)
        )

    def with_row(self, i: int, accuracies: Sequence[float] | Tensor) -> "AccuracyMatrix":
        """Add the accuracies after learning tasks 0 to ``i``.

        :param i: number of the task learned last, from zero.
        :param accuracies: accuracy on task 0, 1 and so on, at least up to task ``i``.
        :returns: a new matrix.
        """
        row = torch.as_tensor(accuracies, dtype=torch.float64)
        values = self.values.clone()
        values[i] = math.nan
        values[i, : len(row)] = row
        return replace(self, values=values)

    def with_more_tasks(self, names: Sequence[str]) -> "AccuracyMatrix":
        """Make room for more tasks.

        :param names: the names of all tasks; those of this matrix come first.
        :returns: a new matrix, with NaN for the new tasks.
        """
        more = len(names) - len(self.names)
        values = pad(self.values, (0, more, 0, more), value=math.nan)
        baseline = None if self.baseline is None else pad(self.baseline, (0, more), value=math.nan)
        return AccuracyMatrix(values, tuple(names), baseline)

    def with_next(self, i: int, accuracy: float, baseline: float) -> "AccuracyMatrix":
        """Add the accuracies on task ``i`` before it is learned.

        :param i: number of the task, at least one.
        :param accuracy: accuracy after learning the tasks before it.
        :param baseline: accuracy of an untrained model.
        :returns: a new matrix.
        """
        values = self.values.clone()
        values[i - 1, i] = accuracy
        untrained = self._untrained.clone()
        untrained[i] = baseline
        return replace(self, values=values, baseline=untrained)

    @property
    def learned(self) -> Tensor:
        """Accuracy on each task just after learning it, :math:`R_{j,j}`, shape ``[T]``; NaN where not yet learned."""
        return self.values.diagonal().clone()

    @property
    def average_by_task(self) -> Tensor:
        r"""Average accuracy on the tasks learned so far, after each task, shape ``[T]``; NaN where not yet learned.

        .. math:: A_i = \frac{1}{i + 1} \sum_{j=0}^{i} R_{i,j}
        """
        # A product with a mask would spread NaN from above the diagonal.
        return torch.stack([row[: i + 1].mean() for i, row in enumerate(self.values)])

    @property
    def average_accuracy(self) -> float:
        r"""Average accuracy on all tasks after the last one, from 0 to 1.

        .. math:: \mathrm{ACC} = \frac{1}{T} \sum_{j=0}^{T-1} R_{T-1,j}

        Source: Lopez-Paz and Ranzato (2017), equation 2.

        :raises ValueError: if the last task is not learned.
        """
        self._need_rows(len(self.names) - 1)
        return float(self.values[-1].mean())

    @property
    def backward_transfer(self) -> float:
        r"""The change of the accuracy on earlier tasks by learning later ones; negative for forgetting.

        .. math:: \mathrm{BWT} = \frac{1}{T - 1} \sum_{j=0}^{T-2} R_{T-1,j} - R_{j,j}

        Source: Lopez-Paz and Ranzato (2017), equation 3.

        :raises ValueError: with one task only, or if a task is not learned.
        """
        self._need_two_tasks("backward_transfer")
        return float((self.values[-1] - self.learned)[:-1].mean())

    @property
    def forward_transfer(self) -> float:
        r"""The gain over an untrained model on each task just before it is learned; positive if earlier tasks help.

        .. math:: \mathrm{FWT} = \frac{1}{T - 1} \sum_{j=1}^{T-1} R_{j-1,j} - b_j

        Source: Lopez-Paz and Ranzato (2017), equation 4, where the untrained model is a network as it was initialized.
        Here it is the model under its own prior.

        :raises ValueError: with one task only, or without the accuracies on tasks before they were learned, which
            ``train_stream(..., forward_transfer=True)`` measures.
        """
        self._need_two_tasks("forward_transfer")
        gains = self.values.diagonal(1) - self._untrained[1:]
        for name, gain in zip(self.names[1:], gains.tolist(), strict=True):
            if math.isnan(gain):
                raise ValueError(
                    f"values and baseline must have accuracies on task {name!r} before it was learned, got NaN; "
                    "train_stream(..., forward_transfer=True) measures them"
                )
        return float(gains.mean())

    @property
    def forgetting(self) -> float:
        r"""The loss from the best accuracy that each task had since it was learned; negative for a gain.

        .. math:: F = \frac{1}{T - 1} \sum_{j=0}^{T-2} \max_{j \le i < T-1} R_{i,j} - R_{T-1,j}

        Source: Chaudhry et al. (2018), *Riemannian Walk for Incremental Learning: Understanding Forgetting and
        Intransigence*. Here the maximum is over the time since the task was learned.

        :raises ValueError: with one task only, or if a task is not learned.
        """
        self._need_two_tasks("forgetting")
        is_before_learning = torch.ones_like(self.values, dtype=torch.bool).triu(1)
        best = self.values.masked_fill(is_before_learning, -math.inf)[:-1].max(0).values
        return float((best - self.values[-1])[:-1].mean())

    @property
    def _untrained(self) -> Tensor:
        """The accuracies of an untrained model, NaN where not measured."""
        return torch.full_like(self.learned, math.nan) if self.baseline is None else self.baseline

    def _need_two_tasks(self, measure: str) -> None:
        if len(self.names) < 2:
            raise ValueError(
                f"{measure}: names must hold at least two tasks, got {len(self.names)}"
            )
        self._need_rows(0)

    def _need_rows(self, start: int) -> None:
        """Raise an error if this row or a later one of the matrix is not measured."""
        for i in range(start, len(self.names)):
            if self.values[i].isnan().all():
                raise ValueError(
                    f"values: row {i}, after learning {self.names[i]!r}, must be measured, got NaN"
                )
