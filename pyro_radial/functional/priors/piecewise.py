# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Piecewise functions of one input with a Poisson number of random change points."""

from math import isfinite

import torch
from torch import Tensor

from pyro_radial._pyro.checks import check_number, positive_float
from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["PiecewiseConstant", "PiecewiseLinear"]


class _Pieces(FunctionPrior):
    """Functions of one input with a Poisson number of change points, uniform on an interval."""

    def __init__(self, low: float = 0.0, high: float = 1.0, rate: float = 3.0) -> None:
        super().__init__()
        self.low, self.high = (check_number(n, v, isfinite, "finite") for n, v in (("low", low), ("high", high)))
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got low = {low!r}, high = {high!r}")
        self.rate = positive_float("rate", rate)

    def extra_repr(self) -> str:
        """The settings of the process."""
        return f"low={self.low}, high={self.high}, rate={self.rate}"

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        if x.dim() != 2 or x.shape[1] != 1:
            raise ValueError(f"x must have shape [N, 1] for {type(self).__name__}, got {list(x.shape)}")
        points = x.double().squeeze(1)
        functions = num_samples * num_outputs
        # Drawn on the host, so that their maximum, a shape, needs no host-device synchronization.
        counts = torch.poisson(torch.full((functions, 1), self.rate))
        width = int(counts.max())
        knots = self.low + (self.high - self.low) * torch.rand(functions, width, dtype=points.dtype, device=x.device)
        unused = (torch.arange(width) >= counts).to(x.device)
        knots = knots.masked_fill(unused, torch.inf).sort(-1).values
        values = torch.rand(functions, width + 2, dtype=points.dtype, device=x.device)
        # The piece that a point is on is the number of change points up to it; those not in use are beyond all.
        piece = torch.searchsorted(knots, points.expand(functions, -1).contiguous(), right=True)
        f = self._on_pieces(points, piece, knots, values)
        return f.reshape(num_samples, num_outputs, len(x)).mT

    def _on_pieces(self, points: Tensor, piece: Tensor, knots: Tensor, values: Tensor) -> Tensor:
        """Values ``[F, N]`` of F functions, from ``[N]``, ``[F, N]``, ``[F, K]`` and uniform draws ``[F, K + 2]``."""
        raise NotImplementedError


class PiecewiseConstant(_Pieces):
    r"""Step functions on an interval, with a Poisson number of change points and values from U[0, 1].

    Change points are uniform on ``[low, high]``, so two points d apart have the same value with probability at least
    :math:`e^{-\mathrm{rate}\, d / (\mathrm{high} - \mathrm{low})}`. The outermost pieces extend beyond the interval.
    Outputs are independent.

    Source: Sun et al. (2019), section 5.1 and figure 3, with rate 3 on [0, 1].

    :param float low: the lower end of the interval.
    :param float high: the upper end.
    :param float rate: the expected number of change points.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> PiecewiseConstant().sample(x, num_samples=4).shape
        torch.Size([4, 50, 1])
    """

    def _on_pieces(self, points: Tensor, piece: Tensor, knots: Tensor, values: Tensor) -> Tensor:
        return values.gather(-1, piece)


class PiecewiseLinear(_Pieces):
    r"""Piecewise linear functions on an interval, with a Poisson number of kinks and values from U[0, 1].

    The k kinks are uniform on ``[low, high]``. With the ends there are k + 2 knots, each with a value, and the function
    is linear between them. The outermost pieces extend beyond the interval. Outputs are independent.

    Source: Sun et al. (2019), section 5.1 and figure 3, with rate 3 on [0, 1]; their code draws k + 1 values and reads
    past them.

    :param float low: the lower end of the interval.
    :param float high: the upper end.
    :param float rate: the expected number of kinks.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> PiecewiseLinear().sample(x, num_samples=4, num_outputs=2).shape
        torch.Size([4, 50, 2])
    """

    def _on_pieces(self, points: Tensor, piece: Tensor, knots: Tensor, values: Tensor) -> Tensor:
        # The first change point not in use becomes the end of the interval; a piece never starts there.
        ends = knots.new_full((len(knots), 1), torch.inf)
        right = torch.cat([knots, ends], -1).clamp_max(self.high)
        left = torch.cat([knots.new_full((len(knots), 1), self.low), right[:, :-1]], -1)
        start, stop = left.gather(-1, piece), right.gather(-1, piece)
        from_value, to_value = values.gather(-1, piece), values.gather(-1, piece + 1)
        return from_value + (to_value - from_value) * (points - start) / (stop - start)
