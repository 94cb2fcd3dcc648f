# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A search for one positive number, and what it has tried."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ScaleCurve", "search_curve"]

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class ScaleCurve:
    """What a search has tried.

    :param torch.Tensor numbers: the multiples of the relative scales, ascending, ``[C]``.
    :param torch.Tensor nll: the validation NLL at each, nats per row, ``[C]``; infinite where it is not finite.
    :param torch.Tensor standard_error: of these over rows, ``[C]``; neighbors share rows and noise, so that they differ
        by much less.
    """

    numbers: Tensor
    nll: Tensor
    standard_error: Tensor

    @property
    def best(self) -> float:
        """The number with the lowest NLL."""
        return float(self.numbers[self.nll.argmin()])

    @property
    def at_end(self) -> bool:
        """Whether the best is the smallest or the largest that was tried, so that the search should go further."""
        return int(self.nll.argmin()) in (0, len(self.nll) - 1)


def search_curve(
    evaluate: Callable[[float], tuple[float, float]], low: float, high: float, num_grid: int, num_refinements: int
) -> ScaleCurve:
    """A grid of the logarithm, then a golden-section search between the neighbors of the best.

    :param evaluate: the NLL at a number, and its standard error.
    :param float low: the least number.
    :param float high: the largest number.
    :param int num_grid: numbers on the grid.
    :param int num_refinements: numbers tried after that.
    """
    logs = torch.linspace(math.log(low), math.log(high), num_grid, dtype=torch.float64).tolist()
    found = {log: evaluate(math.exp(log)) for log in logs}
    best = min(range(num_grid), key=lambda index: found[logs[index]][0])
    left, right = logs[max(best - 1, 0)], logs[min(best + 1, num_grid - 1)]
    inner = [right - GOLDEN * (right - left), left + GOLDEN * (right - left)]
    for log in inner[:num_refinements]:
        found[log] = evaluate(math.exp(log))
    for _ in range(num_refinements - 2):
        if found[inner[0]][0] < found[inner[1]][0]:
            right, inner = inner[1], [inner[1] - GOLDEN * (inner[1] - left), inner[0]]
            new = inner[0]
        else:
            left, inner = inner[0], [inner[1], inner[0] + GOLDEN * (right - inner[0])]
            new = inner[1]
        found[new] = evaluate(math.exp(new))
    ordered = sorted(found)
    values = torch.tensor([found[log] for log in ordered], dtype=torch.float64)
    numbers = torch.tensor([math.exp(log) for log in ordered], dtype=torch.float64)
    return ScaleCurve(numbers, values[:, 0], values[:, 1])
