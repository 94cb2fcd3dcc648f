# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A prior on functions that is known by its draws alone."""

from collections.abc import Callable

from torch import Tensor

from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["ImplicitProcess"]


class ImplicitProcess(FunctionPrior):
    """A prior that is a function to draw with.

    :param sampler: a function of points ``[N, D]`` and a number S that returns the values there of S independent
        functions, ``[S, N, O]``, or ``[S, N]`` for a single output. A module is registered here, and not copied.
    :raises ValueError: naming ``sampler`` if it is no function.

    Example::

        >>> import torch
        >>> def random_line(x, num_samples):
        ...     return torch.randn(num_samples, 1) + torch.randn(num_samples, 1) * x[:, 0]
        >>> ImplicitProcess(random_line).sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])
    """

    def __init__(self, sampler: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        if not callable(sampler):
            raise ValueError(f"sampler must be a function of points and a number of draws, got {sampler!r}")
        self.sampler = sampler

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        values = self.sampler(x, num_samples)
        if not isinstance(values, Tensor):
            raise ValueError(f"sampler must return a tensor, got {type(values).__name__}")
        return values.unsqueeze(-1) if values.dim() == 2 else values
