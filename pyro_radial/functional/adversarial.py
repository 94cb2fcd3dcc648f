# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The adversary of the functional ELBO: measurement points that seek the largest divergence."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.functional.measurement_points import UniformBox

__all__ = ["AdversarialPoints"]


class AdversarialPoints:
    """Measurement points that climb the divergence of the functions from their prior, one step at a time.

    The divergence of two distributions of functions is its supremum over all finite sets of points, so the functional
    ELBO is a game: the network descends it, the points ascend. Points start at random in the box and never leave it.
    Each step is one of Adam in coordinates where the box is the unit cube.

    Source: Sun et al. (2019), section 3.2, who found that it generalizes less well than points drawn at random: it
    ends near the data, where most is known of the function, and nothing shapes the function elsewhere. Put random ones
    beside it with :class:`~pyro_radial.functional.Concatenated`.

    :param UniformBox box: where the points may be, and how many there are, M.
    :param float lr: the learning rate: about the share of a side that a point moves in one step.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> points = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=2), lr=0.05)
        >>> start = points(torch.zeros(5, 1))
        >>> for _ in range(100):
        ...     value = points.ascend(lambda x: -(x - 0.5).square().sum())
        >>> bool(((points(torch.zeros(5, 1)) - 0.5).abs() < 0.05).all())
        True
    """

    def __init__(self, box: UniformBox, lr: float = 0.01) -> None:
        if not isinstance(box, UniformBox):
            raise ValueError(f"box must be a UniformBox, got {type(box).__name__}")
        self.box = box
        self.lr = positive_float("lr", lr)
        # No module: an optimizer that trains the network would take the points for its own, and descend.
        self._unit: Tensor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._like = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        """The points ``[M, D]`` as they are now, without gradient.

        :param Tensor x: a batch of inputs ``[B, D]``, whose dtype and device the points get.
        :raises ValueError: if the batch does not have the box's width.
        """
        self._like = x.new_empty(0)
        if self._unit is None:
            self.box(x)  # Refuses a batch that does not fit before anything is made for its width.
            self._start(torch.rand(self.box.num_points, *x.shape[1:], dtype=torch.double))
        assert self._unit is not None
        if self._unit.shape[1:] != x.shape[1:]:
            raise ValueError(f"x must have inputs of shape {list(self._unit.shape[1:])}, got {list(x.shape[1:])}")
        return self._points(self._unit.detach())

    def ascend(self, objective: Callable[[Tensor], Tensor]) -> Tensor:
        """Moves the points one step up, and back into the box; no other tensor gets a gradient.

        :param objective: a function of points ``[M, D]`` that returns a scalar, differentiable in them.
        :returns: its value before the step, detached.
        :raises RuntimeError: if no batch has been seen, and so the width of points is unknown.
        :raises ValueError: naming ``objective`` if its value is no finite scalar, or has no gradient in the points.
        """
        if self._unit is None or self._optimizer is None:
            raise RuntimeError("call the measurement points on a batch before they ascend")
        value = objective(self._points(self._unit))
        if value.dim() != 0 or not bool(value.isfinite()):
            raise ValueError(f"objective must return a finite scalar, got {value.detach()}")
        if not value.requires_grad:
            raise ValueError("objective must be differentiable in the points, got a value without gradient")
        (gradient,) = torch.autograd.grad(value, [self._unit], allow_unused=True)
        if gradient is None:
            raise ValueError("objective must depend on the points, got a value that does not")
        self._unit.grad = gradient
        self._optimizer.step()
        with torch.no_grad():
            self._unit.clamp_(0.0, 1.0)
        return value.detach()

    def state_dict(self) -> dict[str, Any]:
        """Where the points are and how they move, for a checkpoint."""
        if self._unit is None or self._optimizer is None:
            return {}
        return {"unit": self._unit.detach().clone(), "optimizer": copy.deepcopy(self._optimizer.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        self._unit = self._optimizer = None
        if state:
            self._start(state["unit"].cpu().clone()).load_state_dict(state["optimizer"])

    def _start(self, unit: Tensor) -> torch.optim.Optimizer:
        self._unit = unit.requires_grad_()
        self._optimizer = torch.optim.Adam([self._unit], lr=self.lr, maximize=True)
        return self._optimizer

    def _points(self, unit: Tensor) -> Tensor:
        return self.box.place(unit).to(self._like)

    def __repr__(self) -> str:
        return f"AdversarialPoints({self.box}, lr={self.lr})"
