# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

r"""The divergence of the distribution of a network's function values from a prior on functions, at finitely many
points.

A divergence is a function ``divergence(f, x, prior)`` of draws of function values ``[S, N, O]`` at points ``x`` that
returns a :class:`DivergenceEstimate`. The draws must carry gradients to the parameters of their distribution, and are
treated as draws of one vector of N O values, with two exceptions that their docstrings name.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_radial._checks import positive_count, positive_float
from pyro_radial.functional.gaussian import cholesky, with_diagonal
from pyro_radial.functional.priors import FunctionPrior, check_values
from pyro_radial.functional.scores import Stein

__all__ = ["DivergenceEstimate", "GaussianKL", "RegularisedKL", "SteinKL"]

ScoreEstimator = Callable[..., Tensor]
# A value that earlier ones determine up to this share of its variance is determined by them, and rounding is the rest.
DETERMINED = 1e-12


class DivergenceEstimate(NamedTuple):
    """What an estimate of a divergence gives: a scalar to differentiate, and a number to report."""

    #: A scalar whose gradient estimates that of the divergence. Its value means nothing where ``value`` is None.
    surrogate: Tensor
    #: The estimated divergence in nats, without gradient, or None where only the gradient is estimated.
    value: Tensor | None


class SteinKL:
    r"""The gradient of the KL divergence by the scores of both distributions, for distributions of any form.

    Since the expected score of a distribution is zero, for reparameterized draws f of q

    .. math:: \nabla_\phi KL(q \| p) = E\big[ \nabla_\phi f \cdot (\nabla_f \log q(f) - \nabla_f \log p(f)) \big],

    and the surrogate is the mean over draws of :math:`f \cdot (s_q - s_p)` with both scores held fixed. The score of
    q is estimated from its draws. That of p is the prior's own where it has one; else it is estimated from draws of
    the prior, at the values of q's draws, which few of them may be near to. The divergence itself is not estimated,
    and the gradient is that in the parameters of q alone, not in the points.

    Source: Sun et al. (2019), "Functional Variational Bayesian Neural Networks", section 3.1.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional.priors import GaussianProcess
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> log_scale = torch.zeros((), requires_grad=True)
        >>> f = log_scale.exp() * torch.randn(1000, 3, 1)
        >>> SteinKL()(f, x, GaussianProcess(RBF(1), noise=1.0)).surrogate.backward()
        >>> bool(log_scale.grad < 0)  # a distribution that is too narrow, told to widen
        True

    :param estimator: estimates the score of q: any of :mod:`~pyro_radial.functional.scores`; ``Stein()`` by default,
        the one that is right for normal distributions (slope of the estimate on the truth 0.98 in the mean of 10 to 60
        dimensions and 100 to 500 draws, ``benchmarks/score_estimators.py``) and also follows others.
    :param prior_estimator: estimates that of a prior without a known score; like ``estimator`` by default.
    :param int num_prior_samples: draws of such a prior.
    :raises ValueError: naming the argument that does not fit, and as the estimator does for too few draws.
    """

    def __init__(
        self,
        estimator: ScoreEstimator | None = None,
        prior_estimator: ScoreEstimator | None = None,
        num_prior_samples: int = 500,
    ) -> None:
        for name, given in (("estimator", estimator), ("prior_estimator", prior_estimator)):
            if given is not None and not callable(given):
                raise ValueError(f"{name} must be a function of samples and values, but is {given!r}")
        self.estimator: ScoreEstimator = Stein() if estimator is None else estimator
        self.prior_estimator = self.estimator if prior_estimator is None else prior_estimator
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The surrogate; the value is None."""
        check_values(f, x)
        values = f.detach().double()
        with torch.no_grad():
            score = self.estimator(values.flatten(1)).view_as(values) - self._prior_score(values, x, prior)
        surrogate = (f * score.to(f.dtype)).sum((-2, -1)).mean()
        return DivergenceEstimate(surrogate, None)

    def _prior_score(self, values: Tensor, x: Tensor, prior: FunctionPrior) -> Tensor:
        try:
            return prior.score(values, x)
        except NotImplementedError:
            draws = prior.sample(x, self.num_prior_samples, values.shape[-1]).double()
            return self.prior_estimator(draws.flatten(1), values.flatten(1)).view_as(values)


class GaussianKL:
    r"""The KL divergence between the normal distributions with the moments of the draws and of the prior.

    With n draws of d values, of mean m and covariance S (divided by :math:`\nu = n - 1`), and a prior with moments
    :math:`\mu, K`,

    .. math:: \tfrac12 \Big[ \big(1 - \tfrac1n\big) \operatorname{tr} K^{-1} S + (m - \mu)^T K^{-1} (m - \mu) - d
        + \log\det K - \log\det S + D \Big], \qquad
        D = \sum_{i=1}^d \psi\big(\tfrac{\nu + 1 - i}2\big) + d \log\tfrac2\nu.

    For normal draws its expectation is exactly the divergence, and that of its gradient the gradient: D is how much the
    log-determinant of a Wishart matrix lies below that of its mean in expectation, and the 1/n takes out the spread of
    m. The plain moments of 200 draws at 12 points, divided by n, would give 0.23 nats too much.

    A distribution that is not normal has a larger divergence from a normal prior than its moments say. For a prior that
    is not Gaussian, the moments are those of draws of it, with the same corrections for them, and that of
    :class:`~pyro_radial.functional.scores.GaussianMoments` for the inverse of their covariance; what is estimated then
    is the divergence from the normal distribution nearest to the prior.

    Source: the moments of a Wishart matrix, e.g. Bishop (2006), "Pattern Recognition and Machine Learning", eq. B.81.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional.priors import GaussianProcess
        >>> x, prior = torch.rand(5, 1), GaussianProcess(RBF(1), noise=0.1)
        >>> value = GaussianKL()(prior.sample(x, 100_000), x, prior).value
        >>> bool(value.abs() < 0.02)  # of the prior from itself
        True

    :param bool factorize: False for the divergence of all outputs jointly, which needs more than N O draws. True
        for the sum over outputs of the divergence of each by itself, for which more than N draws suffice. Under a prior
        with independent outputs this leaves out how much q's outputs know of each other, and so is at most the joint
        divergence: a loss with it is no longer a bound unless q's outputs are independent too.
    :param int num_prior_samples: draws of a prior that is not Gaussian.
    :raises ValueError: naming the argument that does not fit; when called, if there are too few draws, or (under
        Pyro's validation) if their covariance is singular: the divergence is infinite.
    """

    def __init__(self, factorize: bool = False, num_prior_samples: int = 1000) -> None:
        self.factorize = factorize
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The divergence, as a surrogate and a value."""
        check_values(f, x)
        q, p = self._moments(f, "f"), self._prior_moments(f, x, prior)
        least = q.dim + 1
        if len(f) < least:
            raise ValueError(
                f"f must be at least {least} draws, one more than the {q.dim} values that are compared jointly, but is "
                f"{len(f)}; RegularisedKL needs no more than two"
            )
        self._check_prior_draws(p)
        factor = torch.linalg.cholesky_ex(q.covariance).L
        if is_validation_enabled():
            _check_not_singular(q.covariance, factor)
        return _estimate(f, _kl(q, factor, p, cholesky(p.covariance)))

    def _check_prior_draws(self, p: "_Moments") -> None:
        if p.num_samples is not None and p.num_samples < p.dim + 3:
            raise ValueError(
                f"num_prior_samples must be at least {p.dim + 3} for {p.dim} values, but is {self.num_prior_samples}"
            )

    def _moments(self, f: Tensor, name: str) -> "_Moments":
        """Moments of draws, with one block for each output or for all."""
        if len(f) < 2:
            raise ValueError(f"{name} must be at least two draws, but is {len(f)}")
        by_output = f.double().permute(2, 0, 1)
        blocks = by_output if self.factorize else by_output.transpose(0, 1).flatten(1).unsqueeze(0)
        mean = blocks.mean(-2)
        centered = blocks - mean.unsqueeze(-2)
        return _Moments(mean, centered.mT @ centered / (len(f) - 1), len(f))

    def _prior_moments(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> "_Moments":
        try:
            mean, covariance = prior.moments(x, f.shape[-1])
        except NotImplementedError:
            return self._moments(prior.sample(x, self.num_prior_samples, f.shape[-1]), "num_prior_samples")
        if self.factorize:
            return _Moments(mean.mT, covariance, None)
        return _Moments(mean.mT.reshape(1, -1), torch.block_diag(*covariance).unsqueeze(0), None)


class RegularisedKL(GaussianKL):
    r"""The KL divergence between the normal distributions of :class:`GaussianKL` with more noise on both.

    .. math:: KL\big( \mathcal N(m, S + \gamma N I)\ \|\ \mathcal N(\mu, K + \gamma N I) \big)

    for N points. It is finite where the divergence of functions is infinite, as that of most networks from most
    Gaussian processes: where draws of one distribution never are draws of the other, or there are fewer draws than
    values. As N grows it tends to a divergence of distributions of functions that all points together define. With
    :math:`\gamma \to 0` it is :class:`GaussianKL`.

    The corrections for sampled moments are those of :class:`GaussianKL` in the limit. Else they are right in the first
    order of 1/n: with :math:`A = (C + \gamma N I)^{-1}` for a sampled covariance C, the log-determinant is corrected by
    D for :math:`d = \operatorname{tr} A C`, the number of directions that the noise does not cover, and a prior's
    inverse becomes :math:`A - (W^2 + W \operatorname{tr} W) A / \nu` with :math:`W = A C`.

    Source: Cinquin and Bamler (2025), "Well-Defined Function-Space Variational Inference in Bayesian Neural Networks
    via Regularized KL-Divergence" (arXiv 2406.04317), section 4, who know the moments of linearized networks and so
    need no correction.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional.priors import GaussianProcess
        >>> x, prior = torch.linspace(0, 1, 40).unsqueeze(-1), GaussianProcess(RBF(1))
        >>> f = torch.randn(30, 1, 1) * x  # straight lines: singular, and fewer than points
        >>> bool(RegularisedKL(gamma=1e-3)(f, x, prior).value.isfinite())
        True

    :param float gamma: the variance of the noise, per point.
    :param bool factorize: as in :class:`GaussianKL`.
    :param int num_prior_samples: as there.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(self, gamma: float, factorize: bool = False, num_prior_samples: int = 1000) -> None:
        super().__init__(factorize, num_prior_samples)
        self.gamma = positive_float("gamma", gamma)

    def __call__(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The divergence, as a surrogate and a value."""
        check_values(f, x)
        noise = self.gamma * len(x)
        q, p = self._moments(f, "f"), self._prior_moments(f, x, prior)
        factors = [torch.linalg.cholesky_ex(with_diagonal(distribution.covariance, noise)).L for distribution in (q, p)]
        return _estimate(f, _kl(q, factors[0], p, factors[1], noise))


class _Moments(NamedTuple):
    """Mean ``[B, d]`` and covariance ``[B, d, d]`` of distributions of one block of values each."""

    mean: Tensor
    covariance: Tensor
    #: How many draws they are the moments of, or None where they are known.
    num_samples: int | None

    @property
    def dim(self) -> int:
        return self.mean.shape[-1]


def _kl(q: _Moments, factor_q: Tensor, p: _Moments, factor_p: Tensor, noise: float = 0.0) -> Tensor:
    """The divergence of each block, given the Cholesky factors of the covariances with the noise added to both."""
    assert q.num_samples is not None
    inverse = torch.cholesky_inverse(factor_p)
    constant: Tensor | float = 0.0
    log_det_p, log_det_q = _log_det(factor_p), _log_det(factor_q)
    log_det_q = log_det_q - _mean_log_det_error(q.num_samples, _trace_of_product(torch.cholesky_inverse(factor_q), q))
    if p.num_samples is not None:
        explained = _trace_of_product(inverse, p)
        log_det_p = log_det_p - _mean_log_det_error(p.num_samples, explained)
        constant = explained / p.num_samples
        inverse = _unbiased_inverse(inverse, p.covariance, p.num_samples)
    trace = _trace_of_product(inverse, q) * (1.0 - 1.0 / q.num_samples)
    trace = trace + noise * inverse.diagonal(dim1=-2, dim2=-1).sum(-1)
    gap = (q.mean - p.mean).unsqueeze(-1)
    distance = (gap.mT @ inverse @ gap).squeeze((-2, -1)) - constant
    return 0.5 * (trace + distance - q.dim + log_det_p - log_det_q)


def _mean_log_det_error(num_samples: int, dim: Tensor) -> Tensor:
    r"""How far the log-determinant of the covariance of so many normal draws is off in expectation, at most zero.

    The sum of :math:`\psi((\nu - i) / 2)` over i from 0 to d - 1 by its antiderivative, so that d can be any number.
    """
    degrees = num_samples - 1
    top = torch.full_like(dim, 0.5 * (degrees + 1))
    return _sum_of_digamma(top) - _sum_of_digamma(top - 0.5 * dim) + dim * math.log(2.0 / degrees)


def _sum_of_digamma(z: Tensor) -> Tensor:
    r"""A function that rises by :math:`\psi(z)` from z to z + 1/2: the sum of two that do so from z to z + 1."""
    return sum(((y - 1.0) * y.digamma() - y for y in (z, z + 0.5)), torch.zeros_like(z))


def _unbiased_inverse(inverse: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    """The inverse of a sampled covariance with noise, without the bias of the first order; without noise, of any."""
    share = inverse @ covariance
    trace = share.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return inverse - (share @ share + trace * share) @ inverse / (num_samples - 1)


def _trace_of_product(matrix: Tensor, distribution: _Moments) -> Tensor:
    return (matrix * distribution.covariance).sum((-2, -1))


def _log_det(factor: Tensor) -> Tensor:
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _check_not_singular(covariance: Tensor, factor: Tensor) -> None:
    pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
    variances = covariance.detach().diagonal(dim1=-2, dim2=-1)
    if not bool((pivots > DETERMINED * variances).all()):
        raise ValueError(
            "f must not have a singular covariance (fewer degrees of freedom than points, or NaN): its divergence is "
            "infinite. RegularisedKL is finite, and so is the divergence of f with noise, from a prior with noise"
        )


def _estimate(f: Tensor, divergence: Tensor) -> DivergenceEstimate:
    total = divergence.sum().to(f.dtype)
    return DivergenceEstimate(total, total.detach())
