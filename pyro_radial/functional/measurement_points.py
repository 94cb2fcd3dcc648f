# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where functions are compared with their prior besides the data: measurement points from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.checks import load_states, positive_count, states
from pyro_radial.functional.checks import check_floating

__all__ = ["BetweenRows", "Concatenated", "FromData", "FromSampler", "MeasurementPoints", "UniformBox"]

#: A function of a batch of inputs ``[B, D]`` (or ``[B, ...]``) that returns further points ``[M, D]``, in the batch's
#: dtype and on its device. The compared functions are free wherever no such point ever lies (Sun et al. 2019,
#: "Functional Variational Bayesian Neural Networks", section 3.2).
MeasurementPoints = Callable[[Tensor], Tensor]


class UniformBox:
    """Points drawn uniformly from a box.

    :param low: the least value of each input: a number, or ``[D]`` (the shape of one input).
    :param high: the largest, likewise.
    :param int num_points: how many points, M.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = UniformBox(low=-1.0, high=1.0, num_points=40)
        >>> points(torch.zeros(20, 3)).shape
        torch.Size([40, 3])
    """

    def __init__(self, low: Any, high: Any, num_points: int) -> None:
        self.low, self.high = _finite("low", low), _finite("high", high)
        if self.low.dim() and self.high.dim() and self.low.shape != self.high.shape:
            raise ValueError(f"high must have the shape of low, {list(self.low.shape)}, got {list(self.high.shape)}")
        if bool((self.low > self.high).any()):
            raise ValueError(f"low must not be above high, got low = {_shown(self.low)}, high = {_shown(self.high)}")
        self.num_points = positive_count("num_points", num_points)

    @classmethod
    def around(cls, x_train: Tensor, num_points: int, margin: float = 0.5) -> UniformBox:
        r"""The box of the training inputs, each side widened at both ends by ``margin`` times its own width.

        Input i has the range :math:`[\min_n x_{ni} - \tfrac d2, \max_n x_{ni} + \tfrac d2]` with its own
        :math:`d = \max_n x_{ni} - \min_n x_{ni}`, at the default margin.

        Source: Sun et al. (2019), section 5; their code takes one range for all inputs, without a margin, and from test
        inputs too.

        :param Tensor x_train: training inputs ``[N, ...]``.
        :param int num_points: how many points, M.
        :param float margin: not negative, in widths of a side.
        :raises ValueError: naming the argument that does not fit.

        Example::

            >>> UniformBox.around(torch.tensor([[0.0, 10.0], [1.0, 30.0]]), num_points=5)
            UniformBox(low=[-0.5, 0.0], high=[1.5, 40.0], num_points=5)
        """
        x_train = _points("x_train", x_train)
        if not 0.0 <= margin < float("inf"):
            raise ValueError(f"margin must be finite and not negative, got {margin!r}")
        low, high = x_train.amin(0), x_train.amax(0)
        return cls(low - margin * (high - low), high + margin * (high - low), num_points)

    def __call__(self, x: Tensor) -> Tensor:
        """Points ``[M, D]``."""
        return self.place(torch.rand(self.num_points, *_shape_of_input(x), dtype=x.dtype, device=x.device))

    def place(self, unit: Tensor) -> Tensor:
        """The points that have the given coordinates ``[M, D]`` when the box is stretched to the unit cube."""
        low, high = (_fitting(name, bound, unit) for name, bound in (("low", self.low), ("high", self.high)))
        # A rounded product may pass the end of the side.
        return (low + (high - low) * unit).clamp(low, high)

    def __repr__(self) -> str:
        return f"UniformBox(low={_shown(self.low)}, high={_shown(self.high)}, num_points={self.num_points})"


class FromData:
    """Random rows of another data set, a new choice for each batch: images of another kind, for instance.

    No row is in one choice twice, since the covariance of a prior at equal points is singular.

    :param Tensor points: ``[R, ...]``, floating point, scaled as the batches are.
    :param int num_points: M, at most R.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = FromData(torch.rand(1000, 1, 28, 28), num_points=16)
        >>> points(torch.rand(32, 1, 28, 28)).shape
        torch.Size([16, 1, 28, 28])
    """

    def __init__(self, points: Tensor, num_points: int) -> None:
        self.points = _points("points", points)
        self.num_points = positive_count("num_points", num_points)
        if num_points > len(points):
            raise ValueError(f"num_points must be at most the {len(points)} rows of points, got {num_points}")

    def __call__(self, x: Tensor) -> Tensor:
        """Points ``[M, ...]``."""
        rows = torch.randperm(len(self.points), device=self.points.device)[: self.num_points]
        return _like("points", self.points[rows], x)

    def __repr__(self) -> str:
        return f"FromData({list(self.points.shape)}, num_points={self.num_points})"


class BetweenRows:
    r"""Points on the lines between random pairs of rows, new ones for each batch.

    .. math:: x = x_i + u\,(x_j - x_i), \qquad i \ne j, \qquad u \sim U(0, 1).

    In many dimensions a box around the data is empty almost everywhere, and points that are uniform in it never come
    near the inputs at which predictions are made; between the rows is where new inputs lie as well.

    :param Tensor points: the rows ``[R, ...]``, at least two, such as the training inputs; floating point, scaled as
        the batches are.
    :param int num_points: how many points, M.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = BetweenRows(torch.randn(100, 13), num_points=50)
        >>> points(torch.randn(20, 13)).shape
        torch.Size([50, 13])
    """

    def __init__(self, points: Tensor, num_points: int) -> None:
        self.points = _points("points", points)
        self.num_points = positive_count("num_points", num_points)
        if len(self.points) < 2:
            raise ValueError(f"points must have at least 2 rows to be between, got {len(self.points)}")

    def __call__(self, x: Tensor) -> Tensor:
        """Points ``[M, ...]``."""
        number, device = len(self.points), self.points.device
        first = torch.randint(number, (self.num_points,), device=device)
        # Any other row but the first, each with the same probability.
        second = (first + torch.randint(1, number, (self.num_points,), device=device)) % number
        share = torch.rand(self.num_points, *(1,) * (self.points.dim() - 1), dtype=self.points.dtype, device=device)
        return _like("points", torch.lerp(self.points[first], self.points[second], share), x)

    def __repr__(self) -> str:
        return f"BetweenRows({list(self.points.shape)}, num_points={self.num_points})"


class FromSampler:
    """Points that a function draws, such as the inputs one expects to predict at.

    :param function: a function of a number M that returns points ``[M, ...]``.
    :param int num_points: how many points, M.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = FromSampler(lambda num_points: torch.randn(num_points, 2), num_points=8)
        >>> points(torch.zeros(4, 2)).shape
        torch.Size([8, 2])
    """

    def __init__(self, function: Callable[[int], Tensor], num_points: int) -> None:
        if not callable(function):
            raise ValueError(f"function must be a function of a number of points, got {function!r}")
        self.function = function
        self.num_points = positive_count("num_points", num_points)

    def __call__(self, x: Tensor) -> Tensor:
        """Points ``[M, ...]``."""
        points = self.function(self.num_points)
        if not isinstance(points, Tensor) or points.shape[:1] != (self.num_points,):
            what = list(points.shape) if isinstance(points, Tensor) else type(points).__name__
            raise ValueError(f"function must return a tensor of {self.num_points} points, got {what}")
        return _like("function", points, x)

    def __repr__(self) -> str:
        return f"FromSampler({getattr(self.function, '__name__', self.function)}, num_points={self.num_points})"


class Concatenated:
    """The measurement points of several kinds, one after the other.

    :param parts: at least one.
    :raises ValueError: naming ``parts`` if there is none, or one is no function.

    Example::

        >>> far, near = UniformBox(-9.0, 9.0, num_points=10), UniformBox(-1.0, 1.0, num_points=30)
        >>> Concatenated([far, near])(torch.zeros(4, 2)).shape
        torch.Size([40, 2])
    """

    def __init__(self, parts: Sequence[MeasurementPoints]) -> None:
        self.parts = tuple(parts)
        if not self.parts or not all(callable(part) for part in self.parts):
            raise ValueError(f"parts must be functions of a batch, at least one, got {list(self.parts)!r}")

    def __call__(self, x: Tensor) -> Tensor:
        """Points ``[M, ...]``, where M is the sum over the parts."""
        return torch.cat([part(x) for part in self.parts])

    def ascend(self, objective: Callable[[Tensor], Tensor]) -> None:
        """Lets each part that moves its points do so, on its own points without those of the others.

        :param objective: as of :class:`~pyro_radial.functional.AdversarialPoints`.
        """
        for part in self.parts:
            if hasattr(part, "ascend"):
                part.ascend(objective)

    def state_dict(self) -> dict[str, Any]:
        """The states of those that have one, for a checkpoint."""
        return states(self._named)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        load_states(self._named, state)

    @property
    def _named(self) -> dict[str, Any]:
        return {str(number): part for number, part in enumerate(self.parts)}

    def __repr__(self) -> str:
        return f"Concatenated({list(self.parts)})"


def _finite(argument: str, value: Any) -> Tensor:
    tensor = torch.as_tensor(value, dtype=torch.double).detach()
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{argument} must be finite, got {_shown(tensor)}")
    return tensor


def _points(argument: str, points: Tensor) -> Tensor:
    """Finite points ``[R, ...]``, or a ValueError that names the argument."""
    check_floating(argument, points)
    if points.dim() < 2 or points.numel() == 0:
        raise ValueError(f"{argument} must have shape [N, D], got {list(points.shape)}")
    if not bool(points.isfinite().all()):
        raise ValueError(f"{argument} must be finite, got NaN or infinity")
    return points.detach()


def _shape_of_input(x: Tensor) -> torch.Size:
    """The shape of one input of a batch, or a ValueError that names ``x``."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        what = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a batch of shape [B, D] of floating-point numbers, got {what}")
    return x.shape[1:]


def _fitting(argument: str, bound: Tensor, unit: Tensor) -> Tensor:
    """A bound that one input of the batch has, or a ValueError that names the argument."""
    if bound.dim() and bound.shape != unit.shape[1:]:
        raise ValueError(
            f"{argument} must have the shape of one input of the batch, {list(unit.shape[1:])}, got {list(bound.shape)}"
        )
    return bound.to(unit)


def _like(argument: str, points: Tensor, x: Tensor) -> Tensor:
    """The points as inputs of a batch, or a ValueError that names where they are from."""
    if points.shape[1:] != _shape_of_input(x):
        raise ValueError(
            f"{argument} must give points of the shape of one input of the batch, {list(x.shape[1:])}, "
            f"got {list(points.shape[1:])}"
        )
    return points.to(x)


def _shown(bound: Tensor) -> Any:
    return bound.tolist() if bound.numel() <= 8 else f"<{list(bound.shape)}>"
