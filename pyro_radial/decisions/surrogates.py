# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What stands for an expensive function: a network's posterior, a Gaussian process, random Fourier features."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

try:
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.model import Model
    from botorch.sampling.pathwise import draw_matheron_paths
    from gpytorch.kernels import RBFKernel, ScaleKernel
    from gpytorch.mlls import ExactMarginalLogLikelihood
except ImportError as error:
    raise ImportError("Bayesian optimization needs BoTorch: pip install 'pyro-radial[bo]'") from error

from pyro_radial._pyro.checks import positive_count
from pyro_radial.decisions.botorch_models import FunctionDraws, ProcessModel
from pyro_radial.decisions.refits import Refits
from pyro_radial.functional import PosteriorProcess
from pyro_radial.infer.prediction.sampled_network import SampledNetwork
from pyro_radial.infer.training.data import dtype_of
from pyro_radial.nn.likelihoods import Gaussian

__all__ = ["GaussianProcessSurrogate", "NetworkSurrogate", "RandomFeatures", "Surrogate"]


class Surrogate:
    """Base class: is trained on what is known of a function, and gives models of BoTorch's of it.

    A subclass defines :meth:`refit`, :meth:`draws` and :meth:`normal`; and its state, where training goes on from what
    it was. Points are in the unit cube, in float64. Random numbers are torch's.
    """

    #: Gradient steps taken in all.
    gradient_steps: int = 0

    def begin(self, num_inputs: int) -> None:
        """Make what depends on the number D of inputs."""

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Learn from all evaluations.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: values ``[N, 1]``.
        """
        raise NotImplementedError

    def draws(self, num_draws: int) -> FunctionDraws:
        """So many functions of the posterior, which stay as they are."""
        raise NotImplementedError

    def normal(self) -> Model:
        """A model with a normal posterior."""
        raise NotImplementedError

    def sampled(self, num_draws: int) -> Model:
        """A model for acquisition functions that take samples: the draws."""
        return self.draws(num_draws)

    def state_dict(self) -> dict[str, Any]:
        """All that later refits depend on besides their data."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned, after :meth:`begin`."""


class NetworkSurrogate(Surrogate):
    """A network under any guide and loss, trained on warm with each refit.

    With ``loss=FunctionalELBO(GaussianProcess(kernel), ...)`` its prior is one on functions. The normal model is that
    of the network linearized at the posterior's mean.

    :param nn.Module model: a :class:`~pyro_radial.SupervisedModel` of a network with one output and a likelihood
        without ``num_data``; in float64, for what :class:`FunctionDraws` says.
    :param nn.Module guide: its guide.
    :param refit_options: of :class:`~pyro_radial.decisions.Refits`.
    :raises ValueError: naming the argument that does not fit, and a posterior that is not trained yet.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=0.1))
        >>> surrogate = NetworkSurrogate(model, AutoRadial(model), steps=50, batch_size=8, compile=False)
        >>> x = torch.rand(6, 1).double()
        >>> surrogate.refit(x, x.sin())
        >>> surrogate.draws(8).posterior(x).mean.shape, surrogate.normal().posterior(x).variance.shape
        (torch.Size([6, 1]), torch.Size([6, 1]))
    """

    def __init__(self, model: nn.Module, guide: nn.Module, **refit_options: Any) -> None:
        self.refits = Refits(model, guide, **refit_options, who="NetworkSurrogate")

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Gradient steps taken in all."""
        return self.refits.steps_done

    def begin(self, num_inputs: int) -> None:
        """Make the parameters."""
        self._example = torch.zeros(1, num_inputs, dtype=torch.double)
        self.refits.begin(self._example.expand(2, -1), torch.zeros(2, 1))

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Train on, from where the last refit ended."""
        self._example = x[:1]
        self.refits.refit(x, y)

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws of the guide."""
        refits = self._trained()
        # With a row, for guides that ask whether there are targets.
        served = SampledNetwork(refits.model, refits.guide, num_draws, x=self._example)
        return FunctionDraws(_InDtype(served, dtype_of(refits.guide, refits.model)))

    def normal(self) -> ProcessModel:
        """The linearized process."""
        refits = self._trained()
        posterior: Any = refits.guide
        likelihood: Any = getattr(refits.model, "likelihood", None)
        noise = likelihood.scale if isinstance(likelihood, Gaussian) and hasattr(likelihood, "scale") else 0.0
        return ProcessModel(PosteriorProcess(refits.model, posterior.posterior()), float(noise))

    def state_dict(self) -> dict[str, Any]:
        """That of the training."""
        return {"refits": self.refits.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        self.refits.load_state_dict(state["refits"])

    def _trained(self) -> Refits:
        if not self.refits.steps_done:
            raise ValueError(
                "NetworkSurrogate: the posterior must be trained before it is asked, got no step; refit it"
            )
        return self.refits


class GaussianProcessSurrogate(Surrogate):
    """BoTorch's ``SingleTaskGP``, its parameters fitted anew with each refit; draws are pathwise.

    :param kernel: a function that returns a new kernel of gpytorch's; BoTorch's default without.
    """

    def __init__(self, kernel: Callable[[], Any] | None = None) -> None:
        self.kernel = kernel
        self._gp: SingleTaskGP | None = None

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Fit a new one."""
        self._gp = _fitted(x, y, None if self.kernel is None else self.kernel())

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws by Matheron's rule: random features of the prior, with the exact update."""
        paths = draw_matheron_paths(self.normal(), torch.Size([positive_count("num_draws", num_draws)]))
        return FunctionDraws(_Draws(lambda x: paths(x).unsqueeze(-1), num_draws))

    def sampled(self, num_draws: int) -> Model:
        """The Gaussian process, whose joint samples are exact."""
        return self.normal()

    def normal(self) -> SingleTaskGP:
        """The Gaussian process."""
        if self._gp is None:
            raise ValueError("GaussianProcessSurrogate: it must be fitted before it is asked; refit it")
        return self._gp


class RandomFeatures(Surrogate):
    r"""Bayesian linear regression on random Fourier features of the squared exponential kernel.

    .. math:: f = w^T \phi, \quad w \sim N(0, I), \qquad \phi_m(x) = \sqrt{2 s^2 / M}\, \cos(\omega_m^T x + b_m),
        \quad \omega_m \sim N(0, \mathrm{diag}(\ell)^{-2}), \quad b_m \sim U(0, 2 \pi).

    The length scales, :math:`s` and the noise are those of a Gaussian process fitted to the evaluations; the features
    are new with each refit.

    Source: Rahimi and Recht (2007), "Random Features for Large-Scale Kernel Machines"; as a baseline of Bayesian
    optimization Sun et al. (2019), "Functional variational Bayesian neural networks", appendix C.3.

    :param int num_features: how many features, M.
    :raises ValueError: for a number below one.
    """

    def __init__(self, num_features: int = 500) -> None:
        self.num_features = positive_count("RandomFeatures: num_features", num_features)
        self._process: _FeatureProcess | None = None

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
        self._process = _FeatureProcess(frequencies, phases, scale, offset, noise, x, y)

    def draws(self, num_draws: int) -> FunctionDraws:
        """Draws of the weights."""
        process = self._fitted()
        weights = process.draw(positive_count("num_draws", num_draws))
        return FunctionDraws(
            _Draws(lambda x: (process.offset + weights @ process.features(x).mT).unsqueeze(-1), num_draws)
        )

    def normal(self) -> ProcessModel:
        """The exact process of such functions."""
        return ProcessModel(self._fitted(), float(self._fitted().noise.sqrt()))

    def _fitted(self) -> "_FeatureProcess":
        if self._process is None:
            raise ValueError("RandomFeatures: they must be fitted before they are asked; refit them")
        return self._process


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


class _InDtype(_Draws):
    """Functions that take points of their own dtype, and give values of the points'."""

    def __init__(self, functions: SampledNetwork, dtype: torch.dtype) -> None:
        super().__init__(lambda x: functions(x.to(dtype)).to(x.dtype), functions.num_samples)


def _fitted(x: Tensor, y: Tensor, kernel: Any) -> SingleTaskGP:
    """A Gaussian process of values as they are, with its parameters at their marginal likelihood's maximum."""
    with warnings.catch_warnings():
        # That inputs are to be in the unit cube and values standardized, which is the caller's to decide.
        warnings.simplefilter("ignore")
        gp = SingleTaskGP(x, y, covar_module=kernel, outcome_transform=None)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp))
    return gp
