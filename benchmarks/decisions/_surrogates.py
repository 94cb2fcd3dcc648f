# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Surrogates for an expensive function: a network's posterior, a Gaussian process, random Fourier features.

A surrogate learns from evaluations with ``refit(x, y)``, points ``[N, D]`` in the unit cube and values ``[N, 1]``, both
in float64. ``draws(S)`` are S functions of its posterior and ``normal()`` is a normal posterior, as models of BoTorch.
"""

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from botorch.acquisition import AcquisitionFunction, PosteriorMean
from botorch.acquisition.max_value_entropy_search import qMaxValueEntropy
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.sampling.pathwise import draw_matheron_paths
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.decisions._process_model import ProcessModel
from benchmarks.decisions._refits import Refits
from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.botorch import FunctionDraws
from pyro_radial.functional import GaussianProcess, PosteriorProcess, function_space_laplace
from pyro_radial.infer.prediction.sampled_network import SampledNetwork
from pyro_radial.nn.likelihoods import Gaussian

NUM_CANDIDATES = 256
NUM_MAXIMA = 10


class NetworkSurrogate:
    """A network under any guide and loss, trained further at each refit; its normal model is linearized at the mean.

    :param nn.Module model: a :class:`~pyro_radial.SupervisedModel` of a network in float64 with one output and fixed
        noise.
    :param nn.Module guide: its guide.
    :param int num_inputs: D.
    :param refit_options: options of the training.
    """

    def __init__(self, model: Any, guide: Any, num_inputs: int, **refit_options: Any) -> None:
        self.refits = Refits(model, guide, **refit_options)
        self._example = torch.zeros(1, num_inputs, dtype=torch.double)
        self.refits.begin(self._example.expand(2, -1), torch.zeros(2, 1, dtype=torch.double))

    @property
    def gradient_steps(self) -> int:
        """Gradient steps taken in all."""
        return self.refits.steps_done

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Train further, from where the last refit ended."""
        self.refits.refit(x, y)

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws of the guide."""
        # With an input, for guides that are called with data.
        return FunctionDraws(SampledNetwork(self.refits.model, self.refits.guide, num_draws, x=self._example))

    def normal(self) -> ProcessModel:
        """The linearized process."""
        model: Any = self.refits.model
        guide: Any = self.refits.guide
        return ProcessModel(PosteriorProcess(model, guide.posterior()), float(model.likelihood.scale))


class LaplaceSurrogate:
    """A network under a prior on functions, by function-space Laplace at the evaluations and at points of the cube.

    Each refit continues from the weights of the last. Draws are linear in the weights, as the approximation is.

    :param nn.Module network: the network, as it starts, in float64 with one output.
    :param float noise: standard deviation of the evaluations.
    :param GaussianProcess prior: the prior.
    :param Tensor points: points of the cube, where predictions are made.
    :param int num_steps: the most steps of a refit.
    """

    gradient_steps = 0

    def __init__(
        self, network: nn.Module, noise: float, prior: GaussianProcess, points: Tensor, num_steps: int
    ) -> None:
        self._network, self._prior, self._points, self._num_steps = network, prior, points, num_steps
        self._model: Any = SupervisedModel(BayesianModule(deepcopy(network)), Gaussian(scale=noise))
        self._guide: Any = network

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Approximate the posterior given all evaluations."""
        points = torch.cat([x, self._points])
        with warnings.catch_warnings():
            # A refit that has not ended goes on in the next.
            warnings.filterwarnings("ignore", message=r"The steps ended .* nats above")
            self._guide = function_space_laplace(
                self._model, self._guide, (x, y), self._prior, points, num_steps=self._num_steps
            )

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws of the linearized network."""
        means = {name: value.detach() for name, value in self._guide.median().items()}
        with torch.no_grad():
            drawn = [self._guide() for _ in range(num_draws)]

        def linearized(x: Tensor) -> Tensor:
            def value(weights: dict[str, Tensor]) -> Any:
                return functional_call(self._network, weights, (x,), strict=True)

            found = []
            for weights in drawn:
                moved = {name: weights[name] - mean for name, mean in means.items()}
                pair: Any = torch.func.jvp(value, (means,), (moved,))
                found.append(sum(pair))
            return torch.stack(found)

        return FunctionDraws(_Draws(linearized, num_draws))

    def normal(self) -> ProcessModel:
        """The linearized process."""
        return ProcessModel(
            PosteriorProcess(self._model, self._guide.get_posterior()), float(self._model.likelihood.scale)
        )


class GaussianProcessSurrogate:
    """BoTorch's ``SingleTaskGP``, fitted anew at each refit; draws are pathwise."""

    gradient_steps = 0

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Fit a new one."""
        self._gp = _fitted(x, y, None)

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws by Matheron's rule: random features of the prior, with the exact update."""
        paths = draw_matheron_paths(self._gp, torch.Size([num_draws]))
        return FunctionDraws(_Draws(lambda x: paths(x).unsqueeze(-1), num_draws))

    def normal(self) -> SingleTaskGP:
        """The Gaussian process."""
        return self._gp


class RandomFeatures:
    r"""Bayesian linear regression on random Fourier features of the squared exponential kernel.

    .. math:: f = w^T \phi, \quad w \sim N(0, I), \qquad \phi_m(x) = \sqrt{2 s^2 / M}\, \cos(\omega_m^T x + b_m),
        \quad \omega_m \sim N(0, \mathrm{diag}(\ell)^{-2}), \quad b_m \sim U(0, 2 \pi).

    The length scales, :math:`s` and the noise are those of a Gaussian process fitted to the evaluations; features are
    drawn anew at each refit.

    Source: Rahimi and Recht (2007), "Random Features for Large-Scale Kernel Machines"; as a baseline of Bayesian
    optimization Sun et al. (2019), "Functional variational Bayesian neural networks", appendix C.3.

    """

    gradient_steps = 0
    #: The number of features, M.
    num_features = 500

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Fit the kernel, draw the features, and take the weights' posterior."""
        gp: Any = _fitted(x, y, ScaleKernel(RBFKernel(ard_num_dims=x.shape[-1])))
        kernel, noise = gp.covar_module, gp.likelihood.noise.detach().squeeze()
        frequencies = (
            torch.randn(self.num_features, x.shape[-1], dtype=x.dtype) / kernel.base_kernel.lengthscale.detach()
        )
        phases = 2.0 * math.pi * torch.rand(self.num_features, dtype=x.dtype)
        scale = (2.0 * kernel.outputscale.detach() / self.num_features).sqrt()
        offset = gp.mean_module.constant.detach()
        self.process = _FeatureProcess(frequencies, phases, scale, offset, noise, x, y)

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws of the weights."""
        process, weights = self.process, self.process.draw(num_draws)
        return FunctionDraws(
            _Draws(lambda x: (process.offset + weights @ process.features(x).mT).unsqueeze(-1), num_draws)
        )

    def normal(self) -> ProcessModel:
        """The exact process of such functions."""
        return ProcessModel(self.process, float(self.process.noise.sqrt()))


Surrogate = NetworkSurrogate | LaplaceSurrogate | GaussianProcessSurrogate | RandomFeatures


def thompson(surrogate: Surrogate, num_inputs: int) -> AcquisitionFunction:
    """One draw of the function."""
    return PosteriorMean(surrogate.draws(1).draw())


def max_value_entropy(surrogate: Surrogate, num_inputs: int) -> AcquisitionFunction:
    """The information of an evaluation about the maximum, with 10 draws of the maximum.

    Source: Wang and Jegelka (2017), "Max-value Entropy Search for Efficient Bayesian Optimization", eq. 6; the maxima
    are drawn from its Gumbel approximation, on random points.
    """
    candidates = torch.rand(NUM_CANDIDATES, num_inputs, dtype=torch.double)
    return qMaxValueEntropy(surrogate.normal(), candidates, num_mv_samples=NUM_MAXIMA)


class _FeatureProcess:
    """The process of a linear function of features, given noisy values."""

    def __init__(
        self, frequencies: Tensor, phases: Tensor, scale: Tensor, offset: Tensor, noise: Tensor, x: Tensor, y: Tensor
    ) -> None:
        self.frequencies, self.phases, self.scale, self.offset, self.noise = frequencies, phases, scale, offset, noise
        design = self.features(x)
        precision = torch.eye(len(phases), dtype=x.dtype) + design.mT @ design / noise
        self._factor = torch.linalg.cholesky(precision)
        self.mean = torch.cholesky_solve(design.mT @ (y - offset), self._factor).squeeze(-1) / noise

    def features(self, x: Tensor) -> Tensor:
        return self.scale * torch.cos(x @ self.frequencies.mT + self.phases)

    def draw(self, number: int) -> Tensor:
        noise = torch.randn(len(self.mean), number, dtype=self.mean.dtype)
        return self.mean + torch.linalg.solve_triangular(self._factor.mT, noise, upper=True).mT

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        half = torch.linalg.solve_triangular(self._factor, features.mT, upper=False)
        return (self.offset + features @ self.mean).unsqueeze(-1), half.square().sum(0).unsqueeze(-1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        half = torch.linalg.solve_triangular(self._factor, features.mT, upper=False)
        return (self.offset + features @ self.mean).unsqueeze(-1), (half.mT @ half).unsqueeze(0)


class _Draws:
    """A function of points with values ``[S, N, 1]``, and S."""

    def __init__(self, function: Callable[[Tensor], Tensor], num_samples: int) -> None:
        self._function, self.num_samples = function, num_samples

    def __call__(self, x: Tensor) -> Tensor:
        return self._function(x)


def _fitted(x: Tensor, y: Tensor, kernel: Any) -> SingleTaskGP:
    """A Gaussian process of the values without standardization, fitted by maximum marginal likelihood."""
    with warnings.catch_warnings():
        # BoTorch warns if inputs are not in the unit cube or values are not standardized, which the caller decides.
        warnings.simplefilter("ignore")
        gp = SingleTaskGP(x, y, covar_module=kernel, outcome_transform=None)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp))
    return gp
