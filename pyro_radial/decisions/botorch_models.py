# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posteriors over functions as models of BoTorch."""

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
    raise ImportError("Bayesian optimization needs BoTorch: pip install 'pyro-radial[bo]'") from error

from pyro_radial._pyro.checks import non_negative_integer, positive_count

__all__ = ["FunctionDraws", "Functions", "Process", "ProcessModel"]

JITTER = 1e-8

# Points whose joint covariances are computed at once, for batches of some of them.
MAX_JOINT = 256


class Functions(Protocol):
    """S functions, such as a :class:`~pyro_radial.infer.SampledNetwork`."""

    num_samples: int

    def __call__(self, x: Tensor) -> Tensor:
        """Values ``[S, N, M]`` at points ``[N, D]``."""


class Process(Protocol):
    """A process that is normal at any points, such as :class:`~pyro_radial.functional.PosteriorProcess`."""

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance ``[N, O]`` at points ``[N, D]``."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]``."""


class FunctionDraws(EnsembleModel):
    """Fixed draws of a posterior's functions, as an ensemble of BoTorch's.

    The draws stay the same from call to call, so that an acquisition function is a smooth function of its points and
    ``optimize_acqf`` works: ``qLogExpectedImprovement``, ``qUpperConfidenceBound``, ``qLowerBoundMaxValueEntropy``
    (GIBBON) and all others that take samples. What needs a normal distribution takes a :class:`ProcessModel`. Gradients
    in float32 are too coarse for the optimizer of ``optimize_acqf``: let the network be in float64, ``net.double()``.

    :param functions: the draws, ``SampledNetwork(model, guide, num_samples=64)``.
    :param int num_outputs: how many, M.
    :raises ValueError: when asked, for points that the functions do not take.

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
        # In a tuple, or a module would be a part of this one, and its buffers saved twice.
        self._functions = (functions,)
        self._num_outputs = positive_count("FunctionDraws: num_outputs", num_outputs)

    @property
    def num_draws(self) -> int:
        """S."""
        return self._functions[0].num_samples

    @property
    def batch_shape(self) -> torch.Size:
        """None: it is one ensemble."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """The values ``[*B, S, N, M]`` of all draws.

        :param Tensor X: points ``[*B, N, D]``.
        """
        values = _called(self._functions[0], X, "FunctionDraws")
        if values.shape[-1] != self._num_outputs:
            raise ValueError(
                f"FunctionDraws: num_outputs must be that of the functions, {values.shape[-1]}, got {self._num_outputs}"
            )
        return values.unflatten(1, X.shape[:-1]).movedim(0, -3)

    def one(self, index: int = 0) -> GenericDeterministicModel:
        """One draw alone, as a deterministic model: to maximize it is Thompson sampling.

        :param int index: which.
        :raises ValueError: naming it, where there are not so many.
        """
        if non_negative_integer("FunctionDraws.one: index", index) >= self.num_draws:
            raise ValueError(f"FunctionDraws.one: index must be below the {self.num_draws} draws, got {index}")
        return GenericDeterministicModel(lambda X: self(X)[..., index, :, :], self._num_outputs)


class ProcessModel(Model):
    r"""A process with normal function values, as a model of BoTorch's with a normal posterior.

    .. math:: f(X) \sim N\big(m(X), k(X, X)\big), \qquad y = f(X) + N(0, \mathrm{noise}^2 I).

    Of a network's posterior, :class:`~pyro_radial.functional.PosteriorProcess`, it is that of the network linearized at
    the posterior's mean; exact, where the network is linear in its weights. For ``qMaxValueEntropy`` and whatever else
    asks a posterior for its ``distribution``, one candidate at a time: there are no fantasies.

    :param process: with ``marginals`` and ``moments``, as of one network with one output.
    :param float noise: the standard deviation of observations' noise, in the units of the function.
    :raises ValueError: when asked, for points that the process does not take, and for a process of several outputs.

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
        if not 0.0 <= noise < float("inf"):
            raise ValueError(f"ProcessModel: noise must be finite and not negative, got {noise!r}")
        self._process, self.noise = (process,), float(noise)

    @property
    def num_outputs(self) -> int:
        """One."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """None: it is one process."""
        return torch.Size()

    def posterior(
        self,
        X: Tensor,
        output_indices: Any = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint distribution of the values, or of observations.

        :param Tensor X: points ``[*B, N, D]``.
        :param output_indices: of one output, so left out.
        :param observation_noise: whether the noise is in it; or variances ``[*B, N, 1]`` of noise to put in its place.
        :param posterior_transform: of BoTorch's.
        :returns: a ``GPyTorchPosterior`` of batch shape ``[*B]``.
        """
        self.eval()
        X = self.transform_inputs(X)
        mean, covariance = self._moments(X)
        if isinstance(observation_noise, Tensor):
            variance = observation_noise.squeeze(-1).expand_as(mean)
        else:
            variance = torch.full_like(mean, self.noise**2 if observation_noise else 0.0)
        # A covariance of equal points, or of many of a smooth function, has no Cholesky factor without a little more.
        least = JITTER * covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(JITTER)
        covariance = covariance + torch.diag_embed(variance + least)
        posterior = GPyTorchPosterior(MultivariateNormal(mean, covariance))
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=X)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[*B, N]`` and covariance ``[*B, N, N]``, in float64."""
        process, (size, width) = self._process[0], x.shape[-2:]
        if size == 1:
            # By marginals, of which a network with linear layers needs no Jacobian.
            mean, variance = _called(process.marginals, x, "ProcessModel")
            return self._one_output(mean).reshape(x.shape[:-1]), variance.double().reshape(*x.shape[:-1], 1)
        means, covariances = [], []
        for batch in x.reshape(-1, size, width).split(max(1, MAX_JOINT // size)):
            mean, covariance = _called(process.moments, batch, "ProcessModel")
            means.append(self._one_output(mean).reshape(-1, size))
            joint = covariance[0].reshape(len(batch), size, len(batch), size)
            covariances.append(joint.diagonal(dim1=0, dim2=2).movedim(-1, 0))
        covariance = torch.cat(covariances)
        return torch.cat(means).reshape(x.shape[:-1]), covariance.reshape(*x.shape[:-1], size)

    def _one_output(self, mean: Tensor) -> Tensor:
        if mean.shape[-1] != 1:
            raise ValueError(f"ProcessModel: process must have one output, got {mean.shape[-1]}")
        return mean.double()


def _called(function: Callable[[Tensor], Any], x: Tensor, who: str) -> Any:
    """A function at the points of all batches, or a ValueError that names them."""
    try:
        return function(x.reshape(-1, x.shape[-1]))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{who}: X must be points that the functions take, got {list(x.shape)}: {error}") from error
