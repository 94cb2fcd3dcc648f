# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL divergence between normal distributions with the moments of draws and of a prior."""

import math
from typing import NamedTuple

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.functional.divergences.estimate import DivergenceEstimate
from pyro_radial.functional.gaussian import cholesky
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_function_values

# A value that earlier ones determine up to this share of its variance is determined by them; the rest is rounding.
DETERMINED = 1e-12


class BlockMoments(NamedTuple):
    """Means ``[B, d]`` and covariances ``[B, d, d]`` of blocks of values, in float64."""

    mean: Tensor
    covariance: Tensor
    #: The number of draws, or None for known moments.
    num_samples: int | None

    @property
    def dim(self) -> int:
        """The number of values in a block."""
        return self.mean.shape[-1]


class GaussianKL:
    r"""The KL divergence between the normal distributions with the moments of the draws and of the prior.

    For n draws of d values with mean m and covariance S (divided by :math:`\nu = n - 1`), and a prior with moments
    :math:`\mu, K`,

    .. math:: \tfrac12 \Big[ \big(1 - \tfrac1n\big) \operatorname{tr} K^{-1} S + (m - \mu)^T K^{-1} (m - \mu) - d
        + \log\det K - \log\det S + D \Big], \qquad
        D = \sum_{i=1}^d \psi\big(\tfrac{\nu + 1 - i}2\big) + d \log\tfrac2\nu.

    For normal draws this is an unbiased estimate of the divergence, and so is its gradient: D corrects the expected
    log-determinant of a Wishart matrix, 1/n the spread of m. Draws that are not normal have a larger divergence from a
    normal prior than their moments show. A prior that is not Gaussian is represented by the moments of draws, with the
    same corrections.

    Source: the moments of a Wishart matrix, e.g. Bishop (2006), "Pattern Recognition and Machine Learning", eq. B.81;
    for the inverse covariance of a sampled prior, Hartlap, Simon and Schneider (2007), eq. 17.

    :param bool factorize: False for the joint divergence of all outputs, which needs more than N O draws. True for the
        sum over outputs, which needs more than N draws. Under a prior with independent outputs the sum is at most the
        joint divergence, so the loss is then not a bound unless the outputs of q are independent.
    :param int num_prior_samples: draws of a prior that is not Gaussian.
    :raises ValueError: naming the argument that does not fit; when called, for too few draws, and (under Pyro's
        validation) for draws with a singular covariance, whose divergence is infinite.

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
        """Return the divergence, as a surrogate and a value."""
        check_function_values(f, x)
        q = _sampled_moments(f, self.factorize)
        p = moments_of_prior(prior, x, f.shape[-1], self.factorize, self.num_prior_samples)
        if len(f) < q.dim + 1:
            raise ValueError(
                f"f must be at least {q.dim + 1} draws, one more than the {q.dim} values that are compared jointly, "
                f"got {len(f)}; LinearizedKL needs none"
            )
        factor = torch.linalg.cholesky_ex(q.covariance).L
        if is_validation_enabled():
            pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
            variances = q.covariance.detach().diagonal(dim1=-2, dim2=-1)
            if not bool((pivots > DETERMINED * variances).all()):
                raise ValueError(
                    "f must not have a singular covariance, got fewer degrees of freedom than points, or NaN: its "
                    "divergence is infinite. LinearizedKL with a gamma is finite, and so is the divergence from a "
                    "prior with noise"
                )
        return normal_kl(q, factor, p, cholesky(p.covariance), f.dtype)


def _sampled_moments(f: Tensor, factorize: bool) -> BlockMoments:
    """Return the moments of draws ``[S, N, O]``: a block of values for each output if factorized, else one block."""
    by_output = f.double().permute(2, 0, 1)
    blocks = by_output if factorize else by_output.transpose(0, 1).flatten(1).unsqueeze(0)
    mean = blocks.mean(-2)
    centered = blocks - mean.unsqueeze(-2)
    return BlockMoments(mean, centered.mT @ centered / (len(f) - 1), len(f))


def known_moments(mean: Tensor, covariance: Tensor, factorize: bool) -> BlockMoments:
    """Return the moments ``[N, O]`` and ``[O, N, N]`` of independent outputs, as blocks of values.

    There is a block for each output if factorized, else one block.
    """
    if factorize:
        return BlockMoments(mean.mT, covariance, None)
    return BlockMoments(mean.mT.reshape(1, -1), torch.block_diag(*covariance).unsqueeze(0), None)


def moments_of_prior(
    prior: FunctionPrior, x: Tensor, num_outputs: int, factorize: bool, num_prior_samples: int
) -> BlockMoments:
    """Return the moments of a Gaussian prior, or those of draws of any other prior.

    :raises ValueError: for too few draws of a prior to correct their moments.
    """
    try:
        return known_moments(*prior.moments(x, num_outputs), factorize)
    except NotImplementedError:
        p = _sampled_moments(prior.sample(x, num_prior_samples, num_outputs), factorize)
    if num_prior_samples < p.dim + 3:
        raise ValueError(
            f"num_prior_samples must be at least {p.dim + 3} for {p.dim} values, got {num_prior_samples}"
        )
    return p


def normal_kl(
    q: BlockMoments, factor_q: Tensor, p: BlockMoments, factor_p: Tensor, dtype: torch.dtype
) -> DivergenceEstimate:
    """Return the sum of the KL divergences of blocks, corrected for sampled moments, in a dtype.

    :param factor_q: the Cholesky factor of the covariance of q.
    :param factor_p: the Cholesky factor of the covariance of p, with any noise that is to be added.
    """
    inverse = torch.cholesky_inverse(factor_p)
    constant: Tensor | float = 0.0
    spread_of_mean = 0.0
    log_det_p = _log_det(factor_p)
    log_det_q = _log_det(factor_q)
    if q.num_samples is not None:
        spread_of_mean = 1.0 / q.num_samples
        explained = _trace_of_product(torch.cholesky_inverse(factor_q), q)
        log_det_q = log_det_q - _mean_log_det_error(q.num_samples, explained)
    if p.num_samples is not None:
        explained = _trace_of_product(inverse, p)
        log_det_p = log_det_p - _mean_log_det_error(p.num_samples, explained)
        constant = explained / p.num_samples
        inverse = _unbiased_inverse(inverse, p.covariance, p.num_samples)
    trace = _trace_of_product(inverse, q) * (1.0 - spread_of_mean)
    gap = (q.mean - p.mean).unsqueeze(-1)
    distance = (gap.mT @ inverse @ gap).squeeze((-2, -1)) - constant
    by_block = 0.5 * (trace + distance - q.dim + log_det_p - log_det_q)
    divergence = by_block.sum().to(dtype)
    return DivergenceEstimate(divergence, divergence.detach())


def _mean_log_det_error(num_samples: int, dim: Tensor) -> Tensor:
    r"""Return the expected error of the log-determinant of a sampled covariance of normal draws, at most zero.

    The sum of :math:`\psi((\nu - i) / 2)` over i from 0 to d - 1 by its antiderivative, so that d can be any number.
    """
    degrees = num_samples - 1
    top = torch.full_like(dim, 0.5 * (degrees + 1))
    return _sum_of_digamma(top) - _sum_of_digamma(top - 0.5 * dim) + dim * math.log(2.0 / degrees)


def _sum_of_digamma(z: Tensor) -> Tensor:
    r"""Return a function that rises by :math:`\psi(z)` from z to z + 1/2: the sum of two that do so from z to z + 1."""
    return sum(((y - 1.0) * y.digamma() - y for y in (z, z + 0.5)), torch.zeros_like(z))


def _unbiased_inverse(inverse: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    """Return the inverse of a sampled covariance, corrected to the first order with noise, and unbiased without."""
    product = inverse @ covariance
    trace = product.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return inverse - (product @ product + trace * product) @ inverse / (num_samples - 1)


def _trace_of_product(matrix: Tensor, moments: BlockMoments) -> Tensor:
    return (matrix * moments.covariance).sum((-2, -1))


def _log_det(factor: Tensor) -> Tensor:
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
