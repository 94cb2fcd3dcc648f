# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The gradient of the KL divergence from the scores of both distributions, and an estimator of scores."""

from collections.abc import Callable

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial.functional.divergences.estimate import DivergenceEstimate
from pyro_radial.functional.gaussian import JITTER, with_diagonal
from pyro_radial.functional.priors.function_prior import (
    FunctionPrior,
    check_finite,
    check_function_values,
)

#: A function ``estimator(samples, at=None)`` of draws ``[S, K]`` that returns ``[T, K]``: the score of the distribution
#: of the draws at the values ``at``, ``[T, K]``, or at the draws. The result has no gradient.
#:
#: The estimators here work in float64, in coordinates in which the draws are white, so they are equivariant: draws in
#: other units, or mixed by an invertible matrix, have the same score in those. A kernel of one width for all
#: directions, as published, misses the directions in which values at neighboring points differ, where the score of a
#: smooth function's values is largest.
ScoreEstimator = Callable[..., Tensor]


class SteinKL:
    r"""The gradient of the KL divergence from the scores of both distributions, which may have any form.

    Since the expected score of a distribution is zero, for reparameterized draws f of q

    .. math:: \nabla_\phi KL(q \| p) = E\big[ \nabla_\phi f \cdot (\nabla_f \log q(f) - \nabla_f \log p(f)) \big].

    The surrogate is the mean over draws of :math:`f \cdot (s_q - s_p)` with both scores held fixed. The score of q is
    estimated from its draws. The score of p is the prior's own if it has one. Otherwise it is estimated from draws of
    the prior, and few of these may be near the draws of q. The value of the divergence is not estimated.

    Source: Sun et al. (2019), "Functional Variational Bayesian Neural Networks", section 3.1.

    :param estimator: a function ``estimator(samples, at=None)`` of draws ``[S, K]`` that returns the score of their
        distribution at the values ``at``, ``[T, K]``, or at the draws. The default solves Stein's identity around the
        normal distribution of the draws: it is right for normal distributions and follows others.
    :param int num_prior_samples: draws of a prior without a known score.
    :raises ValueError: naming the argument that does not fit, and if the estimator has too few draws.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional import GaussianProcess
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> log_scale = torch.zeros((), requires_grad=True)
        >>> f = log_scale.exp() * torch.randn(1000, 3, 1)
        >>> SteinKL()(f, x, GaussianProcess(RBF(1), noise=1.0)).surrogate.backward()
        >>> bool(log_scale.grad < 0)  # the distribution is too narrow
        True
    """

    def __init__(
        self, estimator: ScoreEstimator | None = None, num_prior_samples: int = 500
    ) -> None:
        self.estimator: ScoreEstimator = SteinScore() if estimator is None else estimator
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """Return the surrogate; the value is None."""
        check_function_values(f, x)
        values = f.detach().double()
        with torch.no_grad():
            score = self.estimator(values.flatten(1)).view_as(values)
            try:
                prior_score = prior.score(values, x)
            except NotImplementedError:
                draws = prior.sample(x, self.num_prior_samples, values.shape[-1]).double()
                prior_score = self.estimator(draws.flatten(1), values.flatten(1)).view_as(values)
        surrogate = (f * (score - prior_score).to(f.dtype)).sum((-2, -1)).mean()
        return DivergenceEstimate(surrogate, None)


class SteinScore:
    r"""Stein's identity solved by ridge regression around the normal distribution of the draws.

    The score satisfies :math:`E[k(f, \cdot) s(f) + \nabla_f k(f, \cdot)] = 0` for every kernel k. Let K be the kernel
    matrix of the n draws X, and :math:`b(z) = \sum_i \nabla_{x_i} k(x_i, z)`. Minimizing the errors plus :math:`\rho`
    times the squared norm of :math:`s - g` in the kernel's space gives, with :math:`\eta = n \rho`,

    .. math:: \hat s(z) = g(z) + \tfrac1\eta \big( h(z) - k(z, X) (K + \eta I)^{-1} h(X) \big), \qquad
        h(z) = -b(z) - k(z, X) g(X).

    Here g is the score of the normal distribution with the draws' mean m and covariance C,

    .. math:: g(z) = -c\, C^{-1} (z - m),

    which the kernel corrects for draws that are not normal. At values independent of the n draws in d dimensions,
    :math:`c = (n - d - 2) / (n - 1)` makes g unbiased for normal draws. At the draws themselves it is
    :math:`n / (n - 1)`, because each draw had a part in C. Then :math:`\frac1n \sum_i g(x_i) (x_i - m)^T = -I`, Stein's
    identity. The kernel is Gaussian with the median distance of white draws as its width.

    Source: with :math:`g = 0` and at the draws this is the estimator of Li and Turner (2018), "Gradient estimators for
    implicit models", section 3; elsewhere the Tikhonov estimator of Zhou, Shi and Zhu (2020), "Nonparametric score
    estimators", section 3, with a diagonal kernel. With :math:`g = 0` it misses most of the score in 60 dimensions. For
    c: Hartlap, Simon and Schneider (2007), eq. 17, with :math:`n - 1` degrees of freedom for C.

    :param float ridge: :math:`\rho`.
    :raises ValueError: naming ``ridge``; when called, naming ``samples``, for fewer than d + 3 draws, and for draws
        without a variance.

    Example::

        >>> draws = torch.randn(2000, 1) + 2.0 * torch.randn(2000, 1).sign()  # two modes
        >>> (SteinScore()(draws, at=torch.tensor([[1.5], [-1.5]])) > 0).flatten()  # uphill is outward
        tensor([ True, False])
    """

    def __init__(self, ridge: float = 0.01) -> None:
        self.ridge = positive_float("ridge", ridge)

    @torch.no_grad()
    def __call__(self, samples: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the estimated score ``[T, K]``."""
        factor = _covariance_factor(samples)
        num_samples, dim = samples.shape
        mean = samples.double().mean(0)

        def whiten(values: Tensor) -> Tensor:
            centered = values.double() - mean
            return torch.linalg.solve_triangular(factor.mT, centered, upper=True, left=False)

        draws = whiten(samples)
        median = torch.nn.functional.pdist(draws).median()
        # Most draws may be equal.
        width = torch.where(median > 0, median, 1.0)
        eta = self.ridge * num_samples
        # The score of the draws' normal distribution.
        base = -draws * num_samples / (num_samples - 1)

        def residual(z: Tensor) -> tuple[Tensor, Tensor]:
            squares = z.square().sum(-1, keepdim=True) + draws.square().sum(-1)
            distance = squares - 2.0 * z @ draws.mT
            kernel = (-0.5 * distance.clamp_min(0.0) / width**2).exp()
            # The kernel's gradient in the draws, summed over them.
            slope = (z * kernel.sum(-1, keepdim=True) - kernel @ draws) / width**2
            return kernel, -slope - kernel @ base

        kernel, h = residual(draws)
        solution = torch.cholesky_solve(h, torch.linalg.cholesky_ex(with_diagonal(kernel, eta)).L)
        score = base + solution
        if at is not None:
            values = whiten(at)
            kernel, h = residual(values)
            normal_score = -values * (num_samples - dim - 2) / (num_samples - 1)
            score = normal_score + (h - kernel @ solution) / eta
        score = torch.linalg.solve_triangular(factor, score, upper=False, left=False)
        return score.to(samples.dtype)


def _covariance_factor(samples: Tensor) -> Tensor:
    """Return the lower Cholesky factor ``[K, K]``, in float64, of the covariance of draws ``[S, K]``.

    In the coordinates that it gives them the draws are white.
    """
    check_finite("samples", samples)
    num_samples, dim = samples.shape
    if num_samples < dim + 3:
        raise ValueError(
            f"samples must be at least {dim + 3} draws of {dim} values, got {num_samples}"
        )
    centered = samples.double() - samples.double().mean(0)
    covariance = centered.mT @ centered / (num_samples - 1)
    mean_variance = covariance.diagonal().mean()
    if is_validation_enabled() and not bool((mean_variance > 0) & mean_variance.isfinite()):
        raise ValueError(
            f"samples must be finite and not all equal, got a variance of {float(mean_variance)}: a distribution at "
            "one point has no score"
        )
    # Draws may have fewer degrees of freedom than values, so the factor may not exist.
    return torch.linalg.cholesky_ex(with_diagonal(covariance, JITTER * mean_variance)).L
