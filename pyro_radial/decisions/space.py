# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The inputs of a function to optimize: a box, of which some sides have a few values only."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Space"]


class Space:
    """A box, and the values that its discrete inputs may have.

    :param bounds: the least and the largest value of each input, ``[2, D]``.
    :param discrete: for an input the values that it may have, in order.
    :param categorical: for an input the codes of its categories, which have no order.
    :raises ValueError: naming the argument: bounds of another shape, not finite or the wrong way round, an input that
        there is not or that is both, and values out of bounds.

    Example::

        >>> space = Space([[0.0, 1.0], [10.0, 4.0]], discrete={1: range(1, 5)})
        >>> space.to_unit(torch.tensor([[5.0, 4.0]]).double())
        tensor([[0.5000, 1.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        bounds: Any,
        discrete: Mapping[int, Sequence[float]] | None = None,
        categorical: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        self.bounds = torch.as_tensor(bounds, dtype=torch.double)
        if self.bounds.dim() != 2 or len(self.bounds) != 2 or not self.bounds.shape[1]:
            raise ValueError(f"bounds must have shape [2, D], got {list(self.bounds.shape)}")
        if not bool(self.bounds.isfinite().all()):
            raise ValueError(f"bounds must be finite, got {self.bounds.tolist()}")
        low, high = self.bounds
        if not bool((low < high).all()):
            raise ValueError(
                f"bounds must have the least values first and below the largest, got {low.tolist()} and {high.tolist()}"
            )
        self.discrete = self._values("discrete", discrete)
        self.categorical = self._values("categorical", categorical)
        if both := sorted(self.discrete.keys() & self.categorical.keys()):
            raise ValueError(f"categorical must be of other inputs than discrete, got {both} in both")

    @property
    def num_inputs(self) -> int:
        """D."""
        return self.bounds.shape[1]

    @property
    def is_continuous(self) -> bool:
        """Whether all inputs are."""
        return not self.discrete and not self.categorical

    @property
    def unit_bounds(self) -> Tensor:
        """Those of the unit cube, ``[2, D]``."""
        return torch.stack([torch.zeros_like(self.bounds[0]), torch.ones_like(self.bounds[0])])

    def to_unit(self, x: Tensor) -> Tensor:
        """Points ``[..., D]`` in the unit cube."""
        low, high = self.bounds
        return (x - low) / (high - low)

    def from_unit(self, unit: Tensor) -> Tensor:
        """Points ``[..., D]`` in the units of the bounds, discrete inputs at exactly one of their values."""
        low, high = self.bounds
        x = (low + (high - low) * unit).clamp(low, high)
        for place, values in self._allowed.items():
            allowed = x.new_tensor(values)
            x[..., place] = allowed[(x[..., place, None] - allowed).abs().argmin(-1)]
        return x

    def random(self, number: int) -> Tensor:
        """Points ``[N, D]`` in the unit cube, each allowed one as likely as any other."""
        unit = torch.rand(number, self.num_inputs, dtype=torch.double)
        for place, values in self.unit_values(self._allowed).items():
            unit[:, place] = unit.new_tensor(values)[torch.randint(len(values), (number,))]
        return unit

    def unit_values(self, allowed: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """The values of discrete inputs in the unit cube."""
        low, high = self.bounds.tolist()
        return {
            place: [(value - low[place]) / (high[place] - low[place]) for value in values]
            for place, values in allowed.items()
        }

    def described(self) -> dict[str, Any]:
        """What a checkpoint must have been made with."""
        listed = {f"discrete {place}": values for place, values in self.discrete.items()}
        listed |= {f"categorical {place}": values for place, values in self.categorical.items()}
        return {"bounds": self.bounds.tolist(), **listed}

    @property
    def _allowed(self) -> dict[int, list[float]]:
        return {**self.discrete, **self.categorical}

    def _values(self, argument: str, given: Mapping[int, Sequence[float]] | None) -> dict[int, list[float]]:
        allowed = {}
        for place, values in (given or {}).items():
            if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < self.num_inputs:
                raise ValueError(f"{argument} must be of inputs 0 to {self.num_inputs - 1}, got {place!r}")
            low, high = self.bounds[:, place].tolist()
            allowed[place] = sorted({float(value) for value in values})
            if not allowed[place] or not low <= allowed[place][0] <= allowed[place][-1] <= high:
                raise ValueError(
                    f"{argument} must have values of input {place} from {low:g} to {high:g}, got {list(values)}"
                )
        return allowed
