# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Sums of priors on functions."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["Sum"]


class Sum(FunctionPrior):
    """The sum of independent functions, one of each prior.

    The sum of Gaussian processes is one, with the sums of their means and covariances.

    :param priors: the summands.
    :raises ValueError: naming ``priors``, for an empty list or an element that is not a prior.

    Example::

        >>> from pyro_radial.functional import GaussianProcess, PiecewiseConstant
        >>> from pyro.contrib.gp.kernels import RBF
        >>> steps_on_a_trend = Sum([GaussianProcess(RBF(input_dim=1)), PiecewiseConstant()])
        >>> steps_on_a_trend.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])
    """

    def __init__(self, priors: Sequence[FunctionPrior]) -> None:
        super().__init__()
        members = list(priors) if isinstance(priors, Iterable) else []
        if not members or not all(isinstance(prior, FunctionPrior) for prior in members):
            raise ValueError(f"priors must be priors on functions, at least one, got {priors!r}")
        self.priors: Any = nn.ModuleList(members)
        self.noise = math.hypot(*(float(prior.noise) for prior in members))

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]``, in float64.

        :raises NotImplementedError: naming the class of a summand that is not Gaussian.
        """
        means, covariances = zip(*(prior.moments(x, num_outputs) for prior in self.priors), strict=True)
        return torch.stack(means).sum(0), torch.stack(covariances).sum(0)

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        return torch.stack([prior.sample(x, num_samples, num_outputs) for prior in self.priors]).sum(0)
