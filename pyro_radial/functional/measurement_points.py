# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measurement points: where functions are compared with their prior, besides the inputs of a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.checks import held_numbers, non_negative_float, positive_count
from pyro_radial.functional.priors.function_prior import check_finite, check_points

#: A function of a batch of inputs ``[B, D]`` (or ``[B, ...]``) that returns further points ``[M, D]`` in the batch's
#: dtype and on its device, such as ``lambda x: torch.randn(20, 2)``. The prior does not shape functions where no point
#: ever lies (Sun et al. 2019, "Functional Variational Bayesian Neural Networks", section 3.2).
MeasurementPoints = Callable[[Tensor], Tensor]


class UniformBox:
    """Points drawn uniformly from a box.

    :param low: the least value of each input, a number or ``[D]`` (the shape of one input).
    :param high: the largest value of each input, a number or ``[D]``.
    :param int num_points: the number of points M.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = UniformBox(low=-1.0, high=1.0, num_points=40)
        >>> points(torch.zeros(20, 3)).shape
        torch.Size([40, 3])
    """

    def __init__(self, low: Any, high: Any, num_points: int) -> None:
        self.low = held_numbers("low", low).detach()
        self.high = held_numbers("high", high).detach()
        check_finite("low", self.low)
        check_finite("high", self.high)
        if self.low.dim() and self.high.dim() and self.low.shape != self.high.shape:
            raise ValueError(
                f"high must have the shape of low, {list(self.low.shape)}, got {list(self.high.shape)}"
            )
        if bool((self.low > self.high).any()):
            raise ValueError(
                f"low must not be above high, got low = {_show(self.low)}, high = {_show(self.high)}"
            )
        self.num_points = positive_count("num_points", num_points)

    @classmethod
    def around(cls, x_train: Tensor, num_points: int, margin: float = 0.5) -> "UniformBox":
        r"""Return the box of the training inputs with each side widened at both ends by ``margin`` times its width.

        Input i has the range :math:`[\min_n x_{ni} - \tfrac d2, \max_n x_{ni} + \tfrac d2]` with its own
        :math:`d = \max_n x_{ni} - \min_n x_{ni}`, at the default margin.

        Source: Sun et al. (2019), section 5; their code uses one range for all inputs, including test inputs, without a
        margin.

        :param Tensor x_train: training inputs ``[N, ...]``.
        :param int num_points: the number of points M.
        :param float margin: the margin in widths of a side, not negative.
        :raises ValueError: naming the argument that does not fit.

        Example::

            >>> UniformBox.around(torch.tensor([[0.0, 10.0], [1.0, 30.0]]), num_points=5)
            UniformBox(low=[-0.5, 0.0], high=[1.5, 40.0], num_points=5)
        """
        check_points(x_train, "x_train")
        margin = non_negative_float("margin", margin)
        low = x_train.amin(0)
        high = x_train.amax(0)
        widening = margin * (high - low)
        return cls(low - widening, high + widening, num_points)

    def __call__(self, x: Tensor) -> Tensor:
        """Draw points ``[M, D]``."""
        unit = torch.rand(self.num_points, *_shape_of_input(x), dtype=x.dtype, device=x.device)
        low = _fit_to_input("low", self.low, unit)
        high = _fit_to_input("high", self.high, unit)
        # Rounding may move a point beyond the end of a side.
        return (low + (high - low) * unit).clamp(low, high)

    def __repr__(self) -> str:
        return f"UniformBox(low={_show(self.low)}, high={_show(self.high)}, num_points={self.num_points})"


class BetweenRows:
    r"""Points on the lines between random pairs of rows, new ones for each batch.

    .. math:: x = x_i + u\,(x_j - x_i), \qquad i \ne j, \qquad u \sim U(0, 1).

    In many dimensions uniform points in a box are never near the inputs of predictions. Points between rows are.

    :param Tensor points: at least two floating-point rows ``[R, ...]``, such as the training inputs, scaled like the
        batches.
    :param int num_points: the number of points M.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = BetweenRows(torch.randn(100, 13), num_points=50)
        >>> points(torch.randn(20, 13)).shape
        torch.Size([50, 13])
    """

    def __init__(self, points: Tensor, num_points: int) -> None:
        check_points(points, "points")
        self.points = points.detach()
        self.num_points = positive_count("num_points", num_points)
        if len(self.points) < 2:
            raise ValueError(f"points must have at least 2 rows, got {len(self.points)}")

    def __call__(self, x: Tensor) -> Tensor:
        """Draw points ``[M, ...]``."""
        if self.points.shape[1:] != _shape_of_input(x):
            raise ValueError(
                f"points must give points of the shape of one input of the batch, {list(x.shape[1:])}, "
                f"got {list(self.points.shape[1:])}"
            )
        number = len(self.points)
        device = self.points.device
        start = torch.randint(number, (self.num_points,), device=device)
        # Another row than the start, each with the same probability.
        end = (start + torch.randint(1, number, (self.num_points,), device=device)) % number
        fraction = torch.rand(
            self.num_points, *(1,) * (self.points.dim() - 1), dtype=self.points.dtype, device=device
        )
        return torch.lerp(self.points[start], self.points[end], fraction).to(x)

    def __repr__(self) -> str:
        return f"BetweenRows({list(self.points.shape)}, num_points={self.num_points})"


def _shape_of_input(x: Tensor) -> torch.Size:
    """Return the shape of one input of a batch, or raise a ValueError."""
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(
            f"x must be a batch of shape [B, D] of floating-point numbers, got {x.dtype} {list(x.shape)}"
        )
    return x.shape[1:]


def _fit_to_input(argument: str, bound: Tensor, unit: Tensor) -> Tensor:
    """Return a bound with the shape of one input of the batch, or raise a ValueError."""
    if bound.dim() and bound.shape != unit.shape[1:]:
        raise ValueError(
            f"{argument} must have the shape of one input of the batch, {list(unit.shape[1:])}, got {list(bound.shape)}"
        )
    return bound.to(unit)


def _show(bound: Tensor) -> Any:
    return bound.tolist() if bound.numel() <= 8 else f"<{list(bound.shape)}>"
