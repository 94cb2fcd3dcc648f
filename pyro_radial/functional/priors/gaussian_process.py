# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The Gaussian process as a prior on functions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import positive_float
from pyro_radial.functional.checks import check_points, check_targets, check_values
from pyro_radial.functional.gaussian import (
    JITTER,
    gaussian_condition,
    gaussian_log_prob,
    gaussian_sample,
    gaussian_score,
    with_diagonal,
)
from pyro_radial.functional.priors.function_prior import FunctionPrior
from pyro_radial.functional.priors.gp_fit import maximize_marginal_likelihood, trainable
from pyro_radial.functional.priors.kernels import Covariance, mean_at, own_copy

__all__ = ["GaussianProcess"]


class GaussianProcess(FunctionPrior):
    r"""A Gaussian process: at any points the function values are jointly normal.

    .. math:: f^X \sim \mathcal N\big(m(X),\ k(X, X) + \mathrm{noise}^2 I\big),

    independently for each output. The gradient of its log-density is exact,
    :math:`-(k(X, X) + \mathrm{noise}^2 I)^{-1} (f - m(X))`. Everything is computed in float64. A covariance that has
    no Cholesky factor gets more jitter, up to ten thousand times as much, before it is refused.

    ``noise`` belongs to the function values, independent from point to point: it is in draws, moments and density. With
    it the divergence from the functions of a network can be finite; these must then carry as much noise themselves.
    The noise of *observations* is another: :meth:`fit` learns it as ``observation_noise``, and no draw holds it.

    Modules among the kernels and means are copied, so that the ones given are never written, and their parameters
    are fixed outside of :meth:`fit`: no optimizer that meets this prior trains them.

    Source: Sun et al. (2019), "Functional Variational Bayesian Neural Networks", sections 3.3, 5 and D.1.

    :param kernel: one kernel for all outputs, or a list of kernels, one for each output. A kernel is one of
        ``pyro.contrib.gp.kernels``, one of ``gpytorch.kernels``, or a function of points ``[N, D]`` and ``[M, D]``
        that returns their covariances ``[N, M]``. Points of more dims are flattened to ``[N, D]``.
    :param mean: a number, or a function of points that returns ``[N]`` or ``[N, O]``; zero by default.
    :param float jitter: what every covariance gets on its diagonal at least, times its mean diagonal.
    :param float noise: the standard deviation of the noise of function values.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> prior = GaussianProcess(RBF(input_dim=1, lengthscale=torch.tensor(0.5)))
        >>> x = torch.linspace(-1, 1, 7).unsqueeze(-1)
        >>> f = prior.sample(x, num_samples=3)
        >>> f.shape, prior.score(f, x).shape, prior.log_prob(f, x).shape
        (torch.Size([3, 7, 1]), torch.Size([3, 7, 1]), torch.Size([3]))
    """

    observation_noise: Tensor

    def __init__(
        self,
        kernel: Any,
        mean: float | Callable[[Tensor], Tensor] | None = None,
        jitter: float = JITTER,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        self._one_for_all = not isinstance(kernel, list | tuple)
        kernels: Sequence[Any] = (kernel,) if self._one_for_all else kernel
        if not kernels:
            raise ValueError("kernel must be a kernel or a list of kernels, got an empty list")
        if mean is not None and not callable(mean) and not (isinstance(mean, int | float) and math.isfinite(mean)):
            raise ValueError(f"mean must be a finite number or a function of points, got {mean!r}")
        self._kernels = nn.ModuleList([Covariance(k) for k in kernels])
        self.mean = own_copy(mean) if callable(mean) else float(mean or 0.0)
        self.jitter = positive_float("jitter", jitter)
        self.noise = 0.0 if noise == 0 else positive_float("noise", noise)
        #: The standard deviation of observations around the function that :meth:`fit` found; zero before.
        self.register_buffer("observation_noise", torch.zeros((), dtype=torch.double))
        # What its maker had frozen stays so in fit.
        self._fitted = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        self.requires_grad_(False)

    @property
    def kernel(self) -> Any:
        """The prior's own kernel, or the list of them, with hyper-parameters as fitted."""
        kernels = [k.function for k in self._kernels]
        return kernels[0] if self._one_for_all else kernels

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]`` in float64, noise included, differentiable in ``x``.

        :raises ValueError: naming the argument that does not fit.
        """
        mean, covariance = self._moments(x, num_outputs)
        return mean, covariance.expand(num_outputs, -1, -1)

    def score(self, f: Tensor, x: Tensor) -> Tensor:
        """The exact gradient of ``log p(f)`` in the function values ``[S, N, O]``, in their dtype.

        :raises ValueError: naming the argument that does not fit.
        """
        check_values(f, x)
        return gaussian_score(f, *self._moments(x, f.shape[-1]), jitter=self.jitter)

    def log_prob(self, f: Tensor, x: Tensor) -> Tensor:
        """The log-density of function values ``[S, N, O]``, ``[S]``, in their dtype.

        :raises ValueError: naming the argument that does not fit.
        """
        check_values(f, x)
        return gaussian_log_prob(f, *self._moments(x, f.shape[-1]), jitter=self.jitter)

    def log_marginal_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        r"""The log-density of observations, :math:`\log \mathcal N(y; m(X), k(X, X) + \mathrm{noise}_{obs}^2 I)`.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: what was observed there, ``[N]`` or ``[N, O]``.
        :returns: a scalar in float64, the sum over outputs.
        :raises ValueError: naming the argument that does not fit.
        """
        return self._log_marginal_likelihood(x, check_targets(y, x), self.observation_noise)

    def posterior(self, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        r"""The exact distribution of the function at points, given observations.

        A network's posterior under this prior should be near to it:

        .. math:: m_* + K_{*x} (K_{xx} + \mathrm{noise}_{obs}^2 I)^{-1} (y - m_x), \qquad
            K_{**} - K_{*x} (K_{xx} + \mathrm{noise}_{obs}^2 I)^{-1} K_{x*},

        without the noise of function values, which is independent from point to point. The noise of observations is
        that of :meth:`fit`, or what ``observation_noise.fill_(...)`` sets. N data cost :math:`N^3`.

        Source: Rasmussen and Williams (2006), "Gaussian Processes for Machine Learning", eq. 2.23 and 2.24.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: what was observed there, ``[N]`` or ``[N, O]``.
        :param Tensor at: points ``[M, D]``.
        :returns: mean ``[M, O]`` and covariances ``[O, M, M]`` in float64; outputs are independent.
        :raises ValueError: naming the argument that does not fit.

        Example::

            >>> from pyro.contrib.gp.kernels import RBF
            >>> x = torch.linspace(-1, 1, 9).unsqueeze(-1)
            >>> mean, covariance = GaussianProcess(RBF(input_dim=1)).posterior(x, x.sin(), torch.tensor([[0.1]]))
            >>> torch.allclose(mean, torch.tensor(0.1).sin().double(), atol=1e-3)
            True
        """
        y = check_targets(y, x)
        check_points(at)
        if at.shape[1:] != x.shape[1:]:
            raise ValueError(f"at must be points as wide as x, {list(x.shape[1:])}, got shape {list(at.shape)}")
        mean, covariance = self._prior_moments(torch.cat([x, at.to(x)]), y.shape[-1])
        return gaussian_condition(mean, covariance, y, self.observation_noise.square(), self.jitter)

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        *,
        num_points: int = 300,
        steps: int = 1000,
        lr: float = 0.02,
        observation_noise: float | None = None,
        progress: bool = True,
    ) -> Tensor:
        r"""Fits the parameters of kernel and mean and the noise of observations to data, and fixes them again.

        Adam maximizes the marginal likelihood; where there are more than ``num_points`` data, each step has a new
        random subset of so many. The noise starts at a tenth of the targets' standard deviation, unless it is known;
        parameters with ``requires_grad=False`` stay as they are.

        Source: Sun et al. (2019), sections 5 and 5.2.2, who take 1000 of large data and 10,000 steps.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: targets ``[N]`` or ``[N, O]``.
        :param int num_points: data in one step.
        :param int steps: steps of Adam.
        :param float lr: its learning rate, on the logarithm of the noise and the kernel's own unconstrained parameters.
        :param float observation_noise: the known standard deviation of the noise, or None to find it.
        :param bool progress: whether to show a progress bar.
        :returns: the log marginal likelihood per datum and output before each step, ``[steps]``, in float64.
        :raises ValueError: naming the argument that does not fit, or ``kernel`` if it has no parameters to fit.

        Example::

            >>> from pyro.contrib.gp.kernels import RBF
            >>> prior = GaussianProcess(RBF(input_dim=1))
            >>> x = torch.linspace(-3, 3, 50).unsqueeze(-1)
            >>> history = prior.fit(x, torch.sin(x) + 0.1 * torch.randn(50, 1), steps=200, progress=False)
            >>> bool(history[-1] > history[0]), 0.05 < float(prior.observation_noise) < 0.15
            (True, True)
        """
        y = check_targets(y, x)
        named = dict(self.named_parameters())
        parameters = [named[name] for name in self._fitted]
        if not parameters:
            raise ValueError(
                "kernel must have parameters to fit, got none; give a module whose parameters require a gradient"
            )
        spread = y.std(correction=0).clamp_min(torch.finfo(y.dtype).eps)
        log_noise = (0.1 * spread).log().requires_grad_()
        if observation_noise is not None:
            log_noise = y.new_tensor(math.log(positive_float("observation_noise", observation_noise)))
        with trainable(parameters):
            history = maximize_marginal_likelihood(
                lambda x, y: self._log_marginal_likelihood(x, y, log_noise.exp()),
                [*parameters, log_noise] if log_noise.requires_grad else parameters,
                (x, y),
                num_points=num_points,
                steps=steps,
                lr=lr,
                progress=progress,
            )
        self.observation_noise.copy_(log_noise.detach().exp())
        return history

    def extra_repr(self) -> str:
        """The settings that are no modules."""
        return f"noise={self.noise}"

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        mean, covariance = self._moments(x, num_outputs)
        return gaussian_sample(mean, covariance, num_samples, jitter=self.jitter)

    def _log_marginal_likelihood(self, x: Tensor, y: Tensor, observation_noise: Tensor) -> Tensor:
        mean, covariance = self._prior_moments(x, y.shape[-1])
        covariance = with_diagonal(covariance, observation_noise.square())
        return gaussian_log_prob(y.unsqueeze(0), mean, covariance, jitter=self.jitter).squeeze(0)

    def _moments(self, x: Tensor, num_outputs: int) -> tuple[Tensor, Tensor]:
        """The moments, with one covariance ``[1, N, N]`` where all outputs share it."""
        mean, covariance = self._prior_moments(x, num_outputs)
        return mean, with_diagonal(covariance, self.noise**2)

    def _prior_moments(self, x: Tensor, num_outputs: int) -> tuple[Tensor, Tensor]:
        check_points(x)
        if not self._one_for_all and num_outputs != len(self._kernels):
            raise ValueError(
                f"num_outputs must be {len(self._kernels)}, one for each kernel of the list, got {num_outputs}"
            )
        points = x.double().flatten(1)
        return mean_at(self.mean, points, num_outputs), torch.stack([k(points) for k in self._kernels])
