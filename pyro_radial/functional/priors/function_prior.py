# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The base class of priors on functions, the prior that is only a sampler, and checks of points and values."""

from collections.abc import Callable

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_radial._pyro.checks import kind_of, positive_count
from pyro_radial._pyro.compat import is_capturing
from pyro_radial.functional.gaussian import (
    JITTER,
    cholesky,
    distinct_covariances,
    gaussian_log_prob,
)


class FunctionPrior(nn.Module):
    """A distribution of functions, given by the joint distribution of its values at any finite set of points.

    A Gaussian prior implements :meth:`moments`. Others implement ``_sample(x, num_samples, num_outputs)``, and
    :meth:`score` and :meth:`log_prob` if they are known.

    Points are ``[N, D]`` (or ``[N, ...]``), function values ``[S, N, O]``: S draws of functions at the same N points,
    with O outputs.
    """

    #: The standard deviation of independent noise in the function values. Functions that are compared with this prior
    #: get the same noise.
    noise: float = 0.0
    #: The least jitter on the diagonal of covariances, times their mean diagonal.
    jitter: float = JITTER

    @torch.no_grad()
    def sample(self, x: Tensor, num_samples: int, num_outputs: int = 1) -> Tensor:
        """Draw S independent functions and return their values ``[S, N, O]``, in the dtype of ``x``, without gradient.

        :param Tensor x: points ``[N, D]``, floating point.
        :param int num_samples: the number of draws, S.
        :param int num_outputs: the number of outputs, O.
        :raises ValueError: naming the argument that does not fit, or the prior if its values have another shape, or
            are not real, or (under Pyro's validation) are NaN.
        """
        check_points(x)
        positive_count("num_samples", num_samples)
        positive_count("num_outputs", num_outputs)
        values = self._sample(x, num_samples, num_outputs)
        name, shape = type(self).__name__, (num_samples, len(x), num_outputs)
        if values.shape != shape:
            raise ValueError(f"{name}: a sample must have shape {shape}, got {tuple(values.shape)}")
        if not values.is_floating_point():
            raise ValueError(
                f"{name}: a sample must be of floating-point numbers, got {values.dtype}"
            )
        if is_validation_enabled() and bool(values.isnan().any()):
            raise ValueError(f"{name}: a sample must be of numbers, got NaN")
        return values.to(x.dtype)

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariances ``[O, N, N]`` of a Gaussian prior, in float64.

        Outputs are independent.

        :raises NotImplementedError: for a prior that is not Gaussian.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is not Gaussian and has no moments and no known density"
        )

    def score(self, f: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of ``log p(f)`` in the function values ``[S, N, O]``, in their dtype.

        :raises NotImplementedError: for a prior without a known density.
        """
        check_function_values(f, x)
        mean, covariance = self.moments(x, f.shape[-1])
        residual = (f.double() - mean).permute(2, 1, 0)
        factor = cholesky(distinct_covariances(covariance), self.jitter)
        return -torch.cholesky_solve(residual, factor).permute(2, 1, 0).to(f.dtype)

    def log_prob(self, f: Tensor, x: Tensor) -> Tensor:
        """Return the log-density of function values ``[S, N, O]``, jointly over points and outputs, ``[S]``.

        :raises NotImplementedError: for a prior without a known density.
        """
        check_function_values(f, x)
        return gaussian_log_prob(f, *self.moments(x, f.shape[-1]), jitter=self.jitter)

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        mean, covariance = self.moments(x, num_outputs)
        shape = (num_outputs, len(x), num_samples)
        noise = torch.randn(shape, dtype=mean.dtype, device=mean.device)
        factor = cholesky(distinct_covariances(covariance), self.jitter)
        return mean + (factor @ noise).permute(2, 1, 0)


class ImplicitProcess(FunctionPrior):
    """A prior that is known only by a function that draws from it.

    :param sampler: a function of points ``[N, D]`` and a number S that returns the values there of S independent
        functions, ``[S, N, O]``, or ``[S, N]`` for a single output. A module is registered and not copied.

    Example::

        >>> def random_line(x, num_samples):
        ...     return torch.randn(num_samples, 1) + torch.randn(num_samples, 1) * x[:, 0]
        >>> ImplicitProcess(random_line).sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])
    """

    def __init__(self, sampler: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.sampler = sampler

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        values = self.sampler(x, num_samples)
        return values.unsqueeze(-1) if values.dim() == 2 else values


def check_floating(argument: str, value: object) -> None:
    """Raise a ValueError unless the value is a tensor of floating-point numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(
            f"{argument} must be a tensor of floating-point numbers, got {_kind(value)}"
        )


def check_points(x: Tensor, argument: str = "x") -> None:
    """Raise a ValueError unless x holds points ``[N, ...]``, which are finite (under Pyro's validation)."""
    check_floating(argument, x)
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(f"{argument} must be points of shape [N, D], got shape {list(x.shape)}")
    check_finite(argument, x)


def check_function_values(f: Tensor, x: Tensor) -> None:
    """Raise a ValueError unless f holds function values ``[S, N, O]`` at points x."""
    check_points(x)
    check_floating("f", f)
    if f.dim() != 3 or f.shape[1] != len(x) or f.numel() == 0:
        raise ValueError(
            f"f must be function values of shape [S, {len(x)}, O], got shape {list(f.shape)}"
        )
    check_finite("f", f)


def check_finite(argument: str, value: Tensor) -> None:
    """Raise a ValueError for NaN or infinity, under Pyro's validation."""
    if is_validation_enabled() and not is_capturing() and not bool(value.isfinite().all()):
        raise ValueError(f"{argument} must be finite, got NaN or infinity")


def check_prior(prior: FunctionPrior) -> None:
    """Raise a ValueError unless this is a prior on functions."""
    if not isinstance(prior, FunctionPrior):
        raise ValueError(
            f"prior must be a prior on functions, such as GaussianProcess(kernel), got {type(prior).__name__}"
        )


def require_moments(
    prior: FunctionPrior, points: Tensor, num_outputs: int
) -> tuple[Tensor, Tensor]:
    """Return the moments of a prior, or raise a ValueError for one without."""
    try:
        return prior.moments(points, num_outputs)
    except NotImplementedError as error:
        raise ValueError(f"prior must have moments, as GaussianProcess has: {error}") from None


def check_targets(y: Tensor, x: Tensor) -> Tensor:
    """Return targets at points x as ``[N, O]`` in float64; raise a ValueError if they do not fit."""
    check_points(x)
    if not isinstance(y, Tensor) or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be a tensor of real numbers, got {_kind(y)}")
    if y.dim() not in (1, 2) or len(y) != len(x):
        raise ValueError(f"y must have shape [{len(x)}] or [{len(x)}, O], got {list(y.shape)}")
    check_finite("y", y)
    return y.double().reshape(len(y), -1)


def _kind(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else kind_of(value)
