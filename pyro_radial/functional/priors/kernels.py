# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels and means of any origin: covariances of points among themselves and mean values there, in float64."""

import copy
from collections.abc import Callable
from typing import Any

from pyro.contrib.gp.kernels import Kernel as PyroKernel
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial._pyro.compat import set_context

__all__ = ["Covariance", "mean_at", "own_copy"]


class Covariance(nn.Module):
    """The covariances of points among themselves, by whatever kind of kernel.

    :param function: a kernel of ``pyro.contrib.gp.kernels`` or ``gpytorch.kernels``, of which it holds a copy, or a
        function of points ``[N, D]`` and ``[M, D]`` that returns ``[N, M]``.
    :raises ValueError: naming ``kernel`` if it is no function.
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        if not callable(function):
            raise ValueError(f"kernel must be a function of two sets of points, got {function!r}")
        self.function = own_copy(function)

    def forward(self, points: Tensor) -> Tensor:
        """Covariances ``[N, N]`` in float64 of points ``[N, D]``, or a ValueError that names ``kernel``."""
        try:
            value = self._call(points)
        except RuntimeError as error:
            raise ValueError(f"kernel must take points of shape {list(points.shape)}, got an error: {error}") from error
        # A strided tensor is its own dense form; gpytorch returns an operator.
        if hasattr(value, "to_dense"):
            value = value.to_dense()
        size = len(points)
        if not isinstance(value, Tensor) or value.shape != (size, size):
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"kernel must return [{size}, {size}] for {size} points and themselves, got {what}")
        return value.double()

    def _call(self, points: Tensor) -> Any:
        # The white noise among Pyro's kernels is zero where two sets of points are given.
        return self.function(points) if isinstance(self.function, PyroKernel) else self.function(points, points)


def mean_at(mean: float | Callable[[Tensor], Tensor], points: Tensor, num_outputs: int) -> Tensor:
    """Mean values ``[N, O]`` in float64 at points ``[N, D]``, or a ValueError that names ``mean``."""
    if isinstance(mean, float):
        return points.new_full((len(points), num_outputs), mean)
    values = mean(points).double()
    if values.shape == points.shape[:1]:
        values = values.unsqueeze(-1)
    if values.shape not in {(len(points), 1), (len(points), num_outputs)}:
        raise ValueError(
            f"mean must return [{len(points)}] or [{len(points)}, {num_outputs}] at points of shape "
            f"{list(points.shape)}, got {list(values.shape)}"
        )
    return values.expand(-1, num_outputs)


class _OwnParameters:
    """A context of a Pyro module that is never active, so that its parameters are its own.

    Pyro's modules otherwise take them from a global store by name, where two kernels of a kind share theirs.
    """

    active, used = 0, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def own_copy(function: Any) -> Any:
    """A copy in float64 of a module, or the function itself."""
    if not isinstance(function, nn.Module):
        return function
    function = copy.deepcopy(function).double()
    for module in function.modules():
        if isinstance(module, PyroModule):
            set_context(module, _OwnParameters())
    return function
