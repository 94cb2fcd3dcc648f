# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions: what they have in common, and the Gaussian process."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_radial._checks import positive_count, positive_float
from pyro_radial.functional.gaussian import (
    JITTER,
    cholesky,
    gaussian_log_prob,
    gaussian_sample,
    gaussian_score,
    with_diagonal,
)
from pyro_radial.functional.gp_fit import maximize_marginal_likelihood
from pyro_radial.functional.kernels import Covariance, own_copy

__all__ = ["FunctionPrior", "GaussianProcess"]


class FunctionPrior(nn.Module):
    """A distribution of functions, known by the distributions of its values at any finite set of points.

    A subclass implements ``_sample(x, num_samples, num_outputs)``, and where they are known
    :meth:`moments`, :meth:`score` and :meth:`log_prob`.

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
        :param int num_samples: S.
        :param int num_outputs: O.
        :raises ValueError: naming the argument that does not fit, or the prior whose values do not: of another shape,
            not real, or (under Pyro's validation) NaN.
        """
        check_points(x)
        positive_count("num_samples", num_samples)
        positive_count("num_outputs", num_outputs)
        values = self._sample(x, num_samples, num_outputs)
        name, shape = type(self).__name__, (num_samples, len(x), num_outputs)
        if values.shape != shape:
            raise ValueError(f"{name}: a sample must have shape {shape}, but it has shape {tuple(values.shape)}")
        if not values.is_floating_point():
            raise ValueError(f"{name}: a sample must be of floating-point numbers, but its dtype is {values.dtype}")
        if is_validation_enabled() and bool(values.isnan().any()):
            raise ValueError(f"{name}: a sample holds NaN")
        return values.to(x.dtype)

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]`` of a Gaussian prior, in float64; outputs are independent.

        :raises NotImplementedError: for a prior that is not Gaussian.
        """
        raise NotImplementedError(f"{type(self).__name__} is not Gaussian: two moments do not describe it")

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


class GaussianProcess(FunctionPrior):
    r"""A Gaussian process: at any points the function values are jointly normal.

    .. math:: f^X \sim \mathcal N\big(m(X),\ k(X, X) + \mathrm{noise}^2 I\big),

    independently for each output. The gradient of its log-density is exact,
    :math:`-(k(X, X) + \mathrm{noise}^2 I)^{-1} (f - m(X))`. Everything is computed in float64. A covariance that has
    no Cholesky factor gets more jitter, up to ten thousand times as much, before it is refused.

    ``noise`` belongs to the function values, independent from point to point: it is in draws, moments and density. With
    it the divergence from the functions of a network can be finite; these must then carry as much noise themselves.
    The noise of *observations* is another: :meth:`fit` learns it as :attr:`observation_noise`, and no draw holds it.

    Modules among the kernels and means are copied, so that the ones given are never written, and their parameters
    are fixed outside of :meth:`fit`: no optimizer that meets this prior trains them.

    Source: Sun et al. (2019), "Functional Variational Bayesian Neural Networks", sections 3.3, 5 and D.1.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> prior = GaussianProcess(RBF(input_dim=1, lengthscale=torch.tensor(0.5)))
        >>> x = torch.linspace(-1, 1, 7).unsqueeze(-1)
        >>> f = prior.sample(x, num_samples=3)
        >>> f.shape, prior.score(f, x).shape, prior.log_prob(f, x).shape
        (torch.Size([3, 7, 1]), torch.Size([3, 7, 1]), torch.Size([3]))

    :param kernel: one kernel for all outputs, or a list of kernels, one for each output. A kernel is one of
        ``pyro.contrib.gp.kernels``, one of ``gpytorch.kernels``, or a function of points ``[N, D]`` and ``[M, D]``
        that returns their covariances ``[N, M]``. Points of more dims are flattened to ``[N, D]``.
    :param mean: a number, or a function of points that returns ``[N]`` or ``[N, O]``; zero by default.
    :param float jitter: what every covariance gets on its diagonal at least, times its mean diagonal.
    :param float noise: the standard deviation of the noise of function values.
    :raises ValueError: naming the argument that does not fit.
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
            raise ValueError("kernel must be a kernel or a list of kernels, but the list is empty")
        if mean is not None and not callable(mean) and not (isinstance(mean, int | float) and math.isfinite(mean)):
            raise ValueError(f"mean must be a finite number or a function of points, but is {mean!r}")
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
        r"""The exact distribution of the function at points, given observations: what a network's posterior should be
        near to.

        .. math:: m_* + K_{*x} (K_{xx} + \mathrm{noise}_{obs}^2 I)^{-1} (y - m_x), \qquad
            K_{**} - K_{*x} (K_{xx} + \mathrm{noise}_{obs}^2 I)^{-1} K_{x*},

        without the noise of function values, which is independent from point to point. The noise of observations is
        that of :meth:`fit`, or what ``observation_noise.fill_(...)`` sets. N data cost :math:`N^3`.

        Source: Rasmussen and Williams (2006), "Gaussian Processes for Machine Learning", eq. 2.23 and 2.24.

        Example::

            >>> from pyro.contrib.gp.kernels import RBF
            >>> x = torch.linspace(-1, 1, 9).unsqueeze(-1)
            >>> mean, covariance = GaussianProcess(RBF(input_dim=1)).posterior(x, x.sin(), torch.tensor([[0.1]]))
            >>> torch.allclose(mean, torch.tensor(0.1).sin().double(), atol=1e-3)
            True

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: what was observed there, ``[N]`` or ``[N, O]``.
        :param Tensor at: points ``[M, D]``.
        :returns: mean ``[M, O]`` and covariances ``[O, M, M]`` in float64; outputs are independent.
        :raises ValueError: naming the argument that does not fit.
        """
        y = check_targets(y, x)
        check_points(at)
        if at.shape[1:] != x.shape[1:]:
            raise ValueError(f"at must be points as wide as x, {list(x.shape[1:])}, but its shape is {list(at.shape)}")
        size, outputs = len(x), y.shape[-1]
        mean, covariance = self._prior_moments(torch.cat([x, at.to(x)]), outputs)
        factor = cholesky(with_diagonal(covariance[:, :size, :size], self.observation_noise.square()), self.jitter)
        half = torch.linalg.solve_triangular(factor, covariance[:, :size, size:], upper=False)
        residual = torch.linalg.solve_triangular(factor, (y - mean[:size]).mT.unsqueeze(-1), upper=False)
        change = (half.mT @ residual).squeeze(-1).mT
        return mean[size:] + change, (covariance[:, size:, size:] - half.mT @ half).expand(outputs, -1, -1)

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
        random subset of so many (Sun et al., sections 5 and 5.2.2, who take 1000 of large data and 10,000 steps).
        The noise starts at a tenth of the targets' standard deviation, unless it is known; parameters with
        ``requires_grad=False`` stay as they are.

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
            raise ValueError("kernel has no parameters to fit; give a module, with parameters that require a gradient")
        spread = y.std(correction=0).clamp_min(torch.finfo(y.dtype).eps)
        log_noise = (0.1 * spread).log().requires_grad_()
        if observation_noise is not None:
            log_noise = y.new_tensor(math.log(positive_float("observation_noise", observation_noise)))
        with _trainable(parameters):
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
                f"num_outputs is {num_outputs}, but kernel is a list of {len(self._kernels)}, one for each"
            )
        points = x.double().flatten(1)
        return self._mean_at(points, num_outputs), torch.stack([k(points) for k in self._kernels])

    def _mean_at(self, points: Tensor, num_outputs: int) -> Tensor:
        if isinstance(self.mean, float):
            return points.new_full((len(points), num_outputs), self.mean)
        mean = self.mean(points).double()
        if mean.shape == points.shape[:1]:
            mean = mean.unsqueeze(-1)
        if mean.shape not in {(len(points), 1), (len(points), num_outputs)}:
            raise ValueError(
                f"mean must return [{len(points)}] or [{len(points)}, {num_outputs}] at points of shape "
                f"{tuple(points.shape)}, but it returns {list(mean.shape)}"
            )
        return mean.expand(-1, num_outputs)


@contextmanager
def _trainable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters that require a gradient within this context, and have none after it."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None


def check_points(x: Tensor) -> None:
    """Points ``[N, ...]``, or a ValueError that names ``x``."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(
            f"x must be a tensor of floating-point numbers, but is {getattr(x, 'dtype', type(x).__name__)}"
        )
    if x.dim() < 2 or x.numel() == 0:
        raise ValueError(f"x must be points of shape [N, D], but its shape is {list(x.shape)}")


def check_values(f: Tensor, x: Tensor) -> None:
    """Function values ``[S, N, O]`` at points x, or a ValueError that names the argument."""
    check_points(x)
    if not isinstance(f, Tensor) or not f.is_floating_point():
        raise ValueError(
            f"f must be a tensor of floating-point numbers, but is {getattr(f, 'dtype', type(f).__name__)}"
        )
    if f.dim() != 3 or f.shape[1] != len(x) or f.numel() == 0:
        raise ValueError(f"f must be function values of shape [S, {len(x)}, O], but its shape is {list(f.shape)}")


def check_targets(y: Tensor, x: Tensor) -> Tensor:
    """Targets at points x, ``[N, O]`` in float64, or a ValueError that names the argument."""
    check_points(x)
    if not isinstance(y, Tensor) or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"y must be a tensor of real numbers, but is {getattr(y, 'dtype', type(y).__name__)}")
    if y.dim() not in (1, 2) or len(y) != len(x):
        raise ValueError(f"y must have shape [{len(x)}] or [{len(x)}, O], but its shape is {list(y.shape)}")
    if not bool(y.isfinite().all()):
        raise ValueError("y must be finite")
    return y.double().reshape(len(y), -1)
