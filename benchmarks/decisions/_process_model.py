# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A process with normal function values as a BoTorch model."""

from typing import Any, Protocol

import torch
from botorch.models.model import Model
from botorch.posteriors import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

JITTER = 1e-8
MAX_JOINT = 256  # points whose joint covariance is computed at once


class Process(Protocol):
    """A process that is normal at any points, such as :class:`~pyro_radial.functional.PosteriorProcess`."""

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance ``[N, O]`` at points ``[N, D]``."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean ``[N, O]`` and the covariances ``[O, N, N]``."""


class ProcessModel(Model):
    r"""Present a process with normal function values as a BoTorch model with a normal posterior.

    .. math:: f(X) \sim N\big(m(X), k(X, X)\big), \qquad y = f(X) + N(0, \mathrm{noise}^2 I).

    For a network, use :class:`~pyro_radial.functional.PosteriorProcess`: the network linearized at the posterior's
    mean, which is exact if the network is linear in its weights. The model suits ``qMaxValueEntropy`` and other
    acquisition functions that need a normal distribution, for one candidate at a time; it has no fantasies.

    :param process: process with ``marginals`` and ``moments`` and one output.
    :param float noise: standard deviation of the observation noise.
    :raises ValueError: when evaluated, for points that the process does not take or several outputs.
    """

    def __init__(self, process: Process, noise: float = 0.0) -> None:
        super().__init__()
        self._process = (process,)
        self.noise = noise

    @property
    def num_outputs(self) -> int:
        """Always 1."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """Empty, for a single process."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: Any = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint distribution of the values at points ``[*B, N, D]``, as in BoTorch.

        :param observation_noise: whether to add the noise; or variances ``[*B, N, 1]`` of other noise.
        :returns: a ``GPyTorchPosterior`` with batch shape ``[*B]``.
        """
        self.eval()
        X = self.transform_inputs(X)
        mean, covariance = self._moments(X)
        if isinstance(observation_noise, Tensor):
            variance = observation_noise.squeeze(-1)
            if variance.shape[-1:] not in (mean.shape[-1:], (1,)) or not bool((variance >= 0).all()):
                raise ValueError(f"observation_noise must be a variance for each point, got {observation_noise}")
            variance = variance.expand_as(mean)
        else:
            variance = torch.full_like(mean, self.noise**2 if observation_noise else 0.0)
        # Jitter, because the covariance of equal or close points can be singular.
        least = JITTER * covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(JITTER)
        covariance = covariance + torch.diag_embed(variance + least)
        posterior = GPyTorchPosterior(MultivariateNormal(mean, covariance))
        if posterior_transform is None:
            return posterior
        return posterior_transform(posterior=posterior, X=X)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean ``[*B, N]`` and the covariance ``[*B, N, N]``, in float64."""
        process = self._process[0]
        size, width = x.shape[-2:]
        if size == 1:
            # Marginals of a network with linear layers need no Jacobian.
            mean, variance = process.marginals(x.reshape(-1, width))
            mean = self._one_output(mean).reshape(x.shape[:-1])
            return mean, variance.double().reshape(*x.shape[:-1], 1)
        means: list[Tensor] = []
        covariances: list[Tensor] = []
        for batch in x.reshape(-1, size, width).split(max(1, MAX_JOINT // size)):
            mean, covariance = process.moments(batch.reshape(-1, width))
            means.append(self._one_output(mean).reshape(-1, size))
            joint = covariance[0].reshape(len(batch), size, len(batch), size)
            covariances.append(joint.diagonal(dim1=0, dim2=2).movedim(-1, 0))
        covariance = torch.cat(covariances)
        return torch.cat(means).reshape(x.shape[:-1]), covariance.reshape(*x.shape[:-1], size)

    def _one_output(self, mean: Tensor) -> Tensor:
        if mean.shape[-1] != 1:
            raise ValueError(f"process must have one output, got {mean.shape[-1]}")
        return mean.double()
