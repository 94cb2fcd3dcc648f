# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a divergence takes and what it gives."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["Divergence", "DivergenceEstimate", "Process", "ProcessDivergence"]


class DivergenceEstimate(NamedTuple):
    """What an estimate of a divergence gives: a scalar to differentiate, and a number to report."""

    #: A scalar whose gradient estimates that of the divergence. Its value means nothing where ``value`` is None.
    surrogate: Tensor
    #: The estimated divergence in nats, without gradient, or None where only the gradient is estimated.
    value: Tensor | None


#: A function ``divergence(f, x, prior)`` of draws of function values ``[S, N, O]`` at points ``x``. The draws must
#: carry gradients to the parameters of their distribution, and are treated as draws of one vector of N O values, with
#: two exceptions that the docstrings name: the factorized forms of ``GaussianKL`` and ``RegularizedKL``.
Divergence = Callable[[Tensor, Tensor, FunctionPrior], DivergenceEstimate]


class Process(Protocol):
    """A distribution of functions whose moments are known."""

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each function value, ``[N, O]``."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances of each output over points, ``[O, N, N]``."""


class ProcessDivergence:
    """Base of divergences that take a process in the place of its draws: ``divergence(process, x, prior)``."""

    def __call__(self, process: Process, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The divergence of the process from the prior at points ``[N, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(process, x, prior)")
