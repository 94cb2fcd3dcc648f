# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL divergence between normal distributions with the moments of draws and of a prior."""

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.functional.checks import check_values
from pyro_radial.functional.divergences.estimate import DivergenceEstimate
from pyro_radial.functional.divergences.moments import (
    Moments,
    check_enough_of_prior,
    moments_of_prior,
    normal_kl,
    sampled_moments,
)
from pyro_radial.functional.gaussian import cholesky
from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["GaussianKL"]

# A value that earlier ones determine up to this share of its variance is determined by them, and rounding is the rest.
DETERMINED = 1e-12


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
    :class:`~pyro_radial.functional.scores.GaussianScore` for the inverse of their covariance; what is estimated then
    is the divergence from the normal distribution nearest to the prior.

    Source: the moments of a Wishart matrix, e.g. Bishop (2006), "Pattern Recognition and Machine Learning", eq. B.81.

    :param bool factorize: False for the divergence of all outputs jointly, which needs more than N O draws. True
        for the sum over outputs of the divergence of each by itself, for which more than N draws suffice. Under a prior
        with independent outputs this leaves out how much q's outputs know of each other, and so is at most the joint
        divergence: a loss with it is no longer a bound unless q's outputs are independent too.
    :param int num_prior_samples: draws of a prior that is not Gaussian.
    :raises ValueError: naming the argument that does not fit; when called, if there are too few draws, or (under
        Pyro's validation) if their covariance is singular: the divergence is infinite.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional import GaussianProcess
        >>> x, prior = torch.rand(5, 1), GaussianProcess(RBF(1), noise=0.1)
        >>> value = GaussianKL()(prior.sample(x, 100_000), x, prior).value
        >>> bool(value.abs() < 0.02)  # of the prior from itself
        True
    """

    def __init__(self, factorize: bool = False, num_prior_samples: int = 1000) -> None:
        self.factorize = factorize
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The divergence, as a surrogate and a value."""
        check_values(f, x)
        q = sampled_moments("f", f, self.factorize)
        p = moments_of_prior(prior, x, f.shape[-1], self.factorize, self.num_prior_samples)
        divergence = self._kl(q, p, len(x)).sum().to(f.dtype)
        return DivergenceEstimate(divergence, divergence.detach())

    def _kl(self, q: Moments, p: Moments, num_points: int) -> Tensor:
        """The divergence of each block."""
        if q.num_samples is not None and q.num_samples < q.dim + 1:
            raise ValueError(
                f"f must be at least {q.dim + 1} draws, one more than the {q.dim} values that are compared jointly, "
                f"got {q.num_samples}; RegularizedKL needs no more than two"
            )
        check_enough_of_prior(p)
        factor = torch.linalg.cholesky_ex(q.covariance).L
        if is_validation_enabled():
            _check_not_singular(q.covariance, factor)
        return normal_kl(q, factor, p, cholesky(p.covariance))


def _check_not_singular(covariance: Tensor, factor: Tensor) -> None:
    pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
    variances = covariance.detach().diagonal(dim1=-2, dim2=-1)
    if not bool((pivots > DETERMINED * variances).all()):
        raise ValueError(
            "f must not have a singular covariance, got fewer degrees of freedom than points, or NaN: its divergence "
            "is infinite. RegularizedKL is finite, and so is the divergence of f with noise, from a prior with noise"
        )
