# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posteriors over functions as BoTorch models, for Bayesian optimization; needs the extra ``botorch``."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.ensemble import EnsembleModel
    from botorch.models.model import Model
    from botorch.posteriors import GPyTorchPosterior
    from gpytorch.distributions import MultivariateNormal
except ImportError as error:
    raise ImportError(
        "Bayesian optimization needs BoTorch: pip install 'pyro-radial[botorch]'"
    ) from error

from pyro_radial._pyro.checks import (
    check_flag,
    check_types,
    non_negative_float,
    non_negative_integer,
    positive_count,
)

__all__ = ["FunctionDraws", "ProcessModel"]

JITTER = 1e-8
MAX_JOINT = 256  # points whose joint covariance is computed at once


class Functions(Protocol):
    """S functions, such as a :class:`~pyro_radial.infer.SampledNetwork`."""

    num_samples: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return the values ``[S, N, M]`` at points ``[N, D]``."""


class Process(Protocol):
    """A process that is normal at any points, such as :class:`~pyro_radial.functional.PosteriorProcess`."""

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the variance ``[N, O]`` at points ``[N, D]``."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean ``[N, O]`` and the covariances ``[O, N, N]``."""


class FunctionDraws(EnsembleModel):
    """Present a fixed set of functions drawn from a posterior as a BoTorch model.

    The draws stay the same from call to call, so an acquisition function is a smooth function of its points and
    ``optimize_acqf`` can maximize it. The model suits acquisition functions that take samples, such as
    ``qLogExpectedImprovement``, ``qUpperConfidenceBound`` or ``qLowerBoundMaxValueEntropy``. For those that need a
    normal posterior, use :class:`ProcessModel`. Use a network in float64 (``net.double()``), because gradients in
    float32 are too coarse for the optimizer of ``optimize_acqf``.

    :param functions: the draws, such as ``SampledNetwork(model, guide, num_samples=64)``.
    :param int num_outputs: number M of outputs.
    :raises ValueError: when evaluated, for points that the functions do not take or another number of outputs.

    Example::

        >>> from botorch.acquisition import qLogExpectedImprovement
        >>> from botorch.optim import optimize_acqf
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.infer import SampledNetwork
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian())
        >>> guide = AutoRadial(model)
        >>> guide.setup(torch.zeros(2, 2).double(), torch.zeros(2, 1).double())
        >>> draws = FunctionDraws(SampledNetwork(model, guide, num_samples=32))
        >>> unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
        >>> acquisition = qLogExpectedImprovement(draws, best_f=0.0)
        >>> x, value = optimize_acqf(acquisition, unit, q=1, num_restarts=2, raw_samples=8)
        >>> x.shape
        torch.Size([1, 2])
    """

    def __init__(self, functions: Functions, num_outputs: int = 1) -> None:
        super().__init__()
        if not callable(functions) or not hasattr(functions, "num_samples"):
            raise ValueError(
                f"functions must be drawn functions, such as a SampledNetwork, got {functions!r}"
            )
        # The tuple keeps a module from becoming a submodule, which would be saved too.
        self._functions = (functions,)
        self._num_outputs = positive_count("num_outputs", num_outputs)

    @property
    def num_draws(self) -> int:
        """Number S of draws."""
        return self._functions[0].num_samples

    @property
    def batch_shape(self) -> torch.Size:
        """Empty, for a single ensemble."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """Return the values ``[*B, S, N, M]`` of all draws at points ``[*B, N, D]``."""
        _check_points(X)
        values = _evaluate(self._functions[0], X)
        if values.shape[-1] != self._num_outputs:
            raise ValueError(
                f"num_outputs must be the {values.shape[-1]} outputs of the functions, got {self._num_outputs}"
            )
        return values.unflatten(1, X.shape[:-1]).movedim(0, -3)

    def one(self, index: int = 0) -> GenericDeterministicModel:
        """Return the draw of this number as a deterministic model; maximizing it is Thompson sampling."""
        if non_negative_integer("index", index) >= self.num_draws:
            raise ValueError(f"index must be below the {self.num_draws} draws, got {index}")
        return GenericDeterministicModel(lambda X: self(X)[..., index, :, :], self._num_outputs)


class ProcessModel(Model):
    r"""Present a process with normal function values as a BoTorch model with a normal posterior.

    .. math:: f(X) \sim N\big(m(X), k(X, X)\big), \qquad y = f(X) + N(0, \mathrm{noise}^2 I).

    For a network, use :class:`~pyro_radial.functional.PosteriorProcess`: the network linearized at the posterior's
    mean, which is exact if the network is linear in its weights. The model suits ``qMaxValueEntropy`` and other
    acquisition functions that need a normal distribution, for one candidate at a time; it has no fantasies.

    :param process: process with ``marginals`` and ``moments`` and one output.
    :param float noise: standard deviation of the observation noise.
    :raises ValueError: when evaluated, for points that the process does not take or several outputs.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> from pyro_radial.functional import PosteriorProcess
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double())
        >>> guide = AutoRadial(bnn)
        >>> guide.setup(torch.zeros(2, 2).double())
        >>> model = ProcessModel(PosteriorProcess(bnn, guide.posterior()))
        >>> model.posterior(torch.rand(5, 3, 2).double()).distribution.covariance_matrix.shape
        torch.Size([5, 3, 3])
    """

    def __init__(self, process: Process, noise: float = 0.0) -> None:
        super().__init__()
        if not hasattr(process, "marginals") or not hasattr(process, "moments"):
            raise ValueError(
                f"process must have marginals and moments, as PosteriorProcess has, got {process!r}"
            )
        self._process = (process,)
        self.noise = non_negative_float("noise", noise)

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
        _check_points(X)
        check_types(Callable | None, posterior_transform=posterior_transform)
        X = self.transform_inputs(X)
        mean, covariance = self._moments(X)
        if isinstance(observation_noise, Tensor):
            variance = observation_noise.squeeze(-1)
            if variance.shape[-1:] not in (mean.shape[-1:], (1,)) or not bool(
                (variance >= 0).all()
            ):
                raise ValueError(
                    f"observation_noise must be a variance for each point, got {observation_noise}"
                )
            variance = variance.expand_as(mean)
        else:
            check_flag("observation_noise", observation_noise)
            variance = torch.full_like(mean, self.noise**2 if observation_noise else 0.0)
        # Jitter, because the covariance of equal or close points can be singular.
        least = JITTER * covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(
            JITTER
        )
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
            mean, variance = _evaluate(process.marginals, x)
            mean = self._one_output(mean).reshape(x.shape[:-1])
            return mean, variance.double().reshape(*x.shape[:-1], 1)
        means: list[Tensor] = []
        covariances: list[Tensor] = []
        for batch in x.reshape(-1, size, width).split(max(1, MAX_JOINT // size)):
            mean, covariance = _evaluate(process.moments, batch)
            means.append(self._one_output(mean).reshape(-1, size))
            joint = covariance[0].reshape(len(batch), size, len(batch), size)
            covariances.append(joint.diagonal(dim1=0, dim2=2).movedim(-1, 0))
        covariance = torch.cat(covariances)
        return torch.cat(means).reshape(x.shape[:-1]), covariance.reshape(*x.shape[:-1], size)

    def _one_output(self, mean: Tensor) -> Tensor:
        if mean.shape[-1] != 1:
            raise ValueError(f"process must have one output, got {mean.shape[-1]}")
        return mean.double()


def _check_points(X: Any) -> None:
    check_types(Tensor, X=X)
    if X.dim() < 2:
        raise ValueError(f"X must be points of shape [*B, N, D], got {list(X.shape)}")


def _evaluate(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Evaluate a function at the points of all batches; an error names their shape."""
    try:
        return function(x.reshape(-1, x.shape[-1]))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"X must be points that the functions take, got {list(x.shape)}: {error}"
        ) from error
