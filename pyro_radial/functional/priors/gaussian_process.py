# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The Gaussian process as a prior on functions."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from pyro.contrib.gp.kernels import Kernel as PyroKernel
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial._pyro.checks import (
    check_number,
    non_negative_float,
    positive_count,
    positive_float,
)
from pyro_radial._pyro.compat import set_context
from pyro_radial.functional.gaussian import (
    JITTER,
    cholesky,
    gaussian_log_prob,
    with_diagonal,
)
from pyro_radial.functional.priors.function_prior import (
    FunctionPrior,
    check_points,
    check_targets,
)

#: A loss that no line search accepts, in nats per datum.
FAR = 1e6


class GaussianProcess(FunctionPrior):
    r"""A Gaussian process: at any points the function values are jointly normal.

    .. math:: f^X \sim \mathcal N\big(m(X),\ k(X, X) + \mathrm{noise}^2 I\big),

    independently for each output, with an exact score and everything in float64. A covariance without a Cholesky factor
    gets up to ten thousand times more jitter before an error is raised.

    ``noise`` is part of the function values: draws, moments and density contain it, and a network's functions get as
    much when they are compared with this prior. The noise of *observations* is not part of the function values;
    :meth:`fit` learns it as ``observation_noise``.

    Kernels and means that are modules are copied. Only :meth:`fit` changes their parameters.

    Source: Sun et al. (2019), "Functional Variational Bayesian Neural Networks", sections 3.3, 5 and D.1.

    :param kernel: one kernel for all outputs, or a list with a kernel for each output. A kernel is one of
        ``pyro.contrib.gp.kernels``, one of ``gpytorch.kernels``, or a function of points ``[N, D]`` and ``[M, D]``
        that returns their covariances ``[N, M]``. Points with more dims are flattened to ``[N, D]``.
    :param mean: a number, or a function of points that returns ``[N]`` or ``[N, O]``; zero by default.
    :param float jitter: the least jitter on the diagonal of covariances, times their mean diagonal.
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
        self._kernels = nn.ModuleList(map(_Covariance, kernels))
        if callable(mean):
            self.mean = _copy_in_double(mean)
        else:
            self.mean = check_number(
                "mean",
                0.0 if mean is None else mean,
                math.isfinite,
                "a finite number or a function of points",
            )
        self.jitter = positive_float("jitter", jitter)
        self.noise = non_negative_float("noise", noise)
        #: The standard deviation of observations around the function; zero until :meth:`fit`.
        self.register_buffer("observation_noise", torch.zeros((), dtype=torch.double))
        # Frozen parameters stay frozen in fit.
        self._fitted = [
            name for name, parameter in self.named_parameters() if parameter.requires_grad
        ]
        self.requires_grad_(False)

    @property
    def kernel(self) -> Any:
        """The prior's own kernel or list of kernels, with fitted parameters."""
        kernels = [k.function for k in self._kernels]
        return kernels[0] if self._one_for_all else kernels

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariances ``[O, N, N]`` in float64, noise included, differentiable in ``x``.

        :raises ValueError: naming the argument that does not fit.
        """
        check_points(x)
        mean, covariance = self._prior_moments(x, num_outputs)
        return mean, with_diagonal(covariance, self.noise**2).expand(num_outputs, -1, -1)

    def log_marginal_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Return the log-density of observations.

        .. math:: \log \mathcal N(y; m(X), k(X, X) + \mathrm{noise}_{obs}^2 I)

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: observations ``[N]`` or ``[N, O]``.
        :returns: a scalar in float64, the sum over outputs.
        :raises ValueError: naming the argument that does not fit.
        """
        return self._log_marginal_likelihood(x, check_targets(y, x), self.observation_noise)

    def posterior(self, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the exact distribution of the function at points, given observations.

        .. math:: m_* + K_{*x} (K_{xx} + \mathrm{noise}_{obs}^2 I)^{-1} (y - m_x), \qquad
            K_{**} - K_{*x} (K_{xx} + \mathrm{noise}_{obs}^2 I)^{-1} K_{x*},

        without the noise of function values. The noise of observations is fitted by :meth:`fit` or set by
        ``observation_noise.fill_(...)``. N data cost :math:`N^3`.

        Source: Rasmussen and Williams (2006), "Gaussian Processes for Machine Learning", eq. 2.23 and 2.24.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: observations ``[N]`` or ``[N, O]``.
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
        check_points(at, "at")
        if at.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"at must be points as wide as x, {list(x.shape[1:])}, got shape {list(at.shape)}"
            )
        size, num_outputs = y.shape
        mean, covariance = self._prior_moments(torch.cat([x, at.to(x)]), num_outputs)
        of_data = with_diagonal(covariance[:, :size, :size], self.observation_noise.square())
        factor = cholesky(of_data, self.jitter)
        half = torch.linalg.solve_triangular(factor, covariance[:, :size, size:], upper=False)
        gap = (y - mean[:size]).mT.unsqueeze(-1)
        residual = torch.linalg.solve_triangular(factor, gap, upper=False)
        change = (half.mT @ residual).squeeze(-1).mT
        posterior_covariance = covariance[:, size:, size:] - half.mT @ half
        return mean[size:] + change, posterior_covariance.expand(num_outputs, -1, -1)

    def fit(
        self,
        x: Tensor,
        y: Tensor,
        *,
        num_points: int = 1000,
        steps: int = 100,
        observation_noise: float | None = None,
    ) -> Tensor:
        r"""Fit the parameters of kernel and mean and the noise of observations to data, and fix them again.

        L-BFGS maximizes the marginal likelihood of at most ``num_points`` random rows. The noise starts at a tenth of
        the targets' standard deviation. Parameters with ``requires_grad=False`` do not change.

        Source: Sun et al. (2019), sections 5 and 5.2.2, who use Adam on random subsets.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: targets ``[N]`` or ``[N, O]``.
        :param int num_points: the most data to fit to.
        :param int steps: the most iterations of L-BFGS.
        :param float observation_noise: the known standard deviation of the noise, or None to fit it.
        :returns: the log marginal likelihood per datum and output at each evaluation, in float64.
        :raises ValueError: naming the argument that does not fit, or ``kernel`` if it has no parameters to fit.

        Example::

            >>> from pyro.contrib.gp.kernels import RBF
            >>> prior = GaussianProcess(RBF(input_dim=1))
            >>> x = torch.linspace(-3, 3, 50).unsqueeze(-1)
            >>> history = prior.fit(x, torch.sin(x) + 0.1 * torch.randn(50, 1))
            >>> bool(history[-1] > history[0]), 0.05 < float(prior.observation_noise) < 0.15
            (True, True)
        """
        y = check_targets(y, x)
        if positive_count("num_points", num_points) < len(x):
            rows = torch.randperm(len(x), device=x.device)[:num_points]
            x, y = x[rows], y[rows]
        parameters = list(map(self.get_parameter, self._fitted))
        if not parameters:
            raise ValueError(
                "kernel must have parameters to fit, got none; give a module whose parameters require a gradient"
            )
        spread = y.std(correction=0).clamp_min(torch.finfo(y.dtype).eps)
        log_noise = (0.1 * spread).log().requires_grad_()
        if observation_noise is not None:
            log_noise = y.new_tensor(
                math.log(positive_float("observation_noise", observation_noise))
            )
        fitted = [*parameters, log_noise] if log_noise.requires_grad else parameters
        optimizer = torch.optim.LBFGS(
            fitted, max_iter=positive_count("steps", steps), line_search_fn="strong_wolfe"
        )
        history: list[Tensor] = []

        def negative_log_likelihood() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            try:
                loss = -self._log_marginal_likelihood(x, y, log_noise.exp()) / y.numel()
            except ValueError:
                if not history:
                    raise
                # A step too long for floating point; the line search takes a shorter one.
                return torch.full_like(history[-1], FAR)
            loss.backward()
            history.append(-loss.detach())
            return loss

        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            optimizer.step(negative_log_likelihood)
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)
                parameter.grad = None
        self.observation_noise.copy_(log_noise.detach().exp())
        return torch.stack(history)

    def extra_repr(self) -> str:
        """Return the noise, for printing."""
        return f"noise={self.noise}"

    def _log_marginal_likelihood(self, x: Tensor, y: Tensor, observation_noise: Tensor) -> Tensor:
        mean, covariance = self._prior_moments(x, y.shape[-1])
        covariance = with_diagonal(covariance, observation_noise.square())
        return gaussian_log_prob(y.unsqueeze(0), mean, covariance, jitter=self.jitter).squeeze(0)

    def _prior_moments(self, x: Tensor, num_outputs: int) -> tuple[Tensor, Tensor]:
        """Return the moments without noise at checked points; one covariance ``[1, N, N]`` if all outputs share it."""
        positive_count("num_outputs", num_outputs)
        if not self._one_for_all and num_outputs != len(self._kernels):
            raise ValueError(
                f"num_outputs must be {len(self._kernels)}, one for each kernel of the list, got {num_outputs}"
            )
        points = x.double().flatten(1)
        return _mean_at(self.mean, points, num_outputs), torch.stack(
            [k(points) for k in self._kernels]
        )


class _Covariance(nn.Module):
    """The covariances of points among themselves, by a copy of Pyro's or gpytorch's kernel, or by a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = _copy_in_double(function)

    def forward(self, points: Tensor) -> Tensor:
        """Return covariances ``[N, N]`` in float64 of points ``[N, D]``."""
        # Pyro's white noise kernel is zero between two sets of points.
        args = (points,) if isinstance(self.function, PyroKernel) else (points, points)
        try:
            value = self.function(*args)
        except RuntimeError as error:
            raise ValueError(
                f"kernel must take points of shape {list(points.shape)}, got an error: {error}"
            ) from error
        # gpytorch returns an operator.
        if hasattr(value, "to_dense"):
            value = value.to_dense()
        size = len(points)
        if value.shape != (size, size):
            raise ValueError(
                f"kernel must return [{size}, {size}] for {size} points and themselves, got {list(value.shape)}"
            )
        return value.double()


def _mean_at(mean: float | Callable[[Tensor], Tensor], points: Tensor, num_outputs: int) -> Tensor:
    """Return mean values ``[N, O]`` in float64 at points ``[N, D]``."""
    if isinstance(mean, float):
        return points.new_full((len(points), num_outputs), mean)
    values = mean(points).double()
    if values.shape == points.shape[:1]:
        values = values.unsqueeze(-1)
    if values.shape not in {(len(points), 1), (len(points), num_outputs)}:
        raise ValueError(
            f"mean must return [{len(points)}] or [{len(points)}, {num_outputs}] at points of shape "
            f"{list(points.shape)}, got {list(values.shape)}"
        )
    return values.expand(-1, num_outputs)


class _OwnParameters(nullcontext[None]):
    """A context that keeps the parameters of a Pyro module out of the global store, where equal kernels share them."""

    active = 0
    used = False


def _copy_in_double(function: object) -> Any:
    """Return a copy in float64 of a module, or the function itself."""
    if not isinstance(function, nn.Module):
        return function
    function = copy.deepcopy(function).double()
    for module in function.modules():
        if isinstance(module, PyroModule):
            set_context(module, _OwnParameters())
    return function
