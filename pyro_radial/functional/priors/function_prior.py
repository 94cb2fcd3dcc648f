# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all priors on functions have in common."""

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_radial._pyro.checks import positive_count
from pyro_radial.functional.checks import check_points

__all__ = ["FunctionPrior"]


class FunctionPrior(nn.Module):
    """A distribution of functions, known by the joint distribution of its values at any finite set of points.

    A subclass implements ``_sample(x, num_samples, num_outputs)``, and where they are known
    :meth:`moments`, :meth:`score` and :meth:`log_prob`, and :meth:`marginals` where these are cheaper alone.

    Points are ``[N, D]`` (or ``[N, ...]``), function values ``[S, N, O]``: S draws of functions at the same N points,
    with O outputs.
    """

    #: The standard deviation of independent noise that is part of the function values, which functions must carry too
    #: where they are compared with this prior.
    noise: float = 0.0

    @torch.no_grad()
    def sample(self, x: Tensor, num_samples: int, num_outputs: int = 1) -> Tensor:
        """Function values ``[S, N, O]`` of S independent draws, in the dtype of ``x`` and without gradient.

        :param Tensor x: points ``[N, D]``, floating point.
        :param int num_samples: how many draws, S.
        :param int num_outputs: how many outputs, O.
        :raises ValueError: naming the argument that does not fit, or the prior whose values do not: of another shape,
            not real, or (under Pyro's validation) NaN.
        """
        check_points(x)
        positive_count("num_samples", num_samples)
        positive_count("num_outputs", num_outputs)
        values = self._sample(x, num_samples, num_outputs)
        name, shape = type(self).__name__, (num_samples, len(x), num_outputs)
        if values.shape != shape:
            raise ValueError(f"{name}: a sample must have shape {shape}, got {tuple(values.shape)}")
        if not values.is_floating_point():
            raise ValueError(f"{name}: a sample must be of floating-point numbers, got {values.dtype}")
        if is_validation_enabled() and bool(values.isnan().any()):
            raise ValueError(f"{name}: a sample must be of numbers, got NaN")
        return values.to(x.dtype)

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]`` of a Gaussian prior, in float64; outputs are independent.

        :raises NotImplementedError: for a prior that is not Gaussian.
        """
        raise NotImplementedError(f"{type(self).__name__} is not Gaussian: two moments do not describe it")

    def marginals(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean and variance of each function value of a Gaussian prior, ``[N, O]``, in float64.

        :raises NotImplementedError: for a prior that is not Gaussian.
        """
        mean, covariance = self.moments(x, num_outputs)
        return mean, covariance.diagonal(dim1=-2, dim2=-1).mT

    def score(self, f: Tensor, x: Tensor) -> Tensor:
        """The gradient of ``log p(f)`` in the function values, ``[S, N, O]``.

        :raises NotImplementedError: for a prior without a known density.
        """
        raise NotImplementedError(f"{type(self).__name__} has no known density, so its score must be estimated")

    def log_prob(self, f: Tensor, x: Tensor) -> Tensor:
        """The log-density of function values ``[S, N, O]``, jointly over points and outputs, ``[S]``.

        :raises NotImplementedError: for a prior without a known density.
        """
        raise NotImplementedError(f"{type(self).__name__} has no known density")

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no _sample")
