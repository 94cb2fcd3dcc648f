# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The arguments and the result of a divergence."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from pyro_radial.functional.priors.function_prior import FunctionPrior


class DivergenceEstimate(NamedTuple):
    """An estimate of a divergence: a scalar to differentiate, and a number to report."""

    #: A scalar with an estimate of the divergence's gradient. Its value means nothing if ``value`` is None.
    surrogate: Tensor
    #: The estimated divergence in nats, without gradient, or None if only the gradient is estimated.
    value: Tensor | None


#: A function ``divergence(f, x, prior)`` of draws of function values ``[S, N, O]`` at points ``x``. The draws carry
#: gradients to the parameters of their distribution, and count as draws of one vector of N O values, except in the
#: factorized form of ``GaussianKL``.
Divergence = Callable[[Tensor, Tensor, FunctionPrior], DivergenceEstimate]


class FunctionDistribution(Protocol):
    """A distribution of functions with known moments."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariances of each output over points, ``[O, N, N]``."""


class ProcessDivergence:
    """Base class of divergences that take a process instead of draws: ``divergence(process, x, prior)``."""

    def __call__(
        self, process: FunctionDistribution, x: Tensor, prior: FunctionPrior
    ) -> DivergenceEstimate:
        """Return the divergence of the process from the prior at points ``[N, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(process, x, prior)")
