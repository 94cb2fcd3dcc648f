# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Moments of function values, sampled or known, and the KL divergence between normal distributions that have them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["Moments", "check_enough_of_prior", "known_moments", "moments_of_prior", "normal_kl", "sampled_moments"]


class Moments(NamedTuple):
    """Mean ``[B, d]`` and covariance ``[B, d, d]`` of distributions of one block of values each, in float64."""

    mean: Tensor
    covariance: Tensor
    #: How many draws they are the moments of, or None where they are known.
    num_samples: int | None

    @property
    def dim(self) -> int:
        """The number of values in a block."""
        return self.mean.shape[-1]


def sampled_moments(argument: str, f: Tensor, factorize: bool) -> Moments:
    """Moments of draws.

    :param str argument: what to name where there are too few.
    :param Tensor f: draws of function values ``[S, N, O]``.
    :param bool factorize: True for a block of N values for each output, False for one block of N O values.
    :raises ValueError: for fewer than two draws.
    """
    if len(f) < 2:
        raise ValueError(f"{argument} must be at least two draws, got {len(f)}")
    by_output = f.double().permute(2, 0, 1)
    blocks = by_output if factorize else by_output.transpose(0, 1).flatten(1).unsqueeze(0)
    mean = blocks.mean(-2)
    centered = blocks - mean.unsqueeze(-2)
    return Moments(mean, centered.mT @ centered / (len(f) - 1), len(f))


def known_moments(mean: Tensor, covariance: Tensor, factorize: bool) -> Moments:
    """Moments of independent outputs, in the blocks of :func:`sampled_moments`.

    :param Tensor mean: ``[N, O]``.
    :param Tensor covariance: ``[O, N, N]``.
    :param bool factorize: as there.
    """
    if factorize:
        return Moments(mean.mT, covariance, None)
    return Moments(mean.mT.reshape(1, -1), torch.block_diag(*covariance).unsqueeze(0), None)


def moments_of_prior(
    prior: FunctionPrior, x: Tensor, num_outputs: int, factorize: bool, num_prior_samples: int
) -> Moments:
    """Those of a prior that is Gaussian, or of so many draws of another.

    :param bool factorize: as of :func:`sampled_moments`.
    """
    try:
        return known_moments(*prior.moments(x, num_outputs), factorize)
    except NotImplementedError:
        return sampled_moments("num_prior_samples", prior.sample(x, num_prior_samples, num_outputs), factorize)


def check_enough_of_prior(p: Moments) -> None:
    """A ValueError for too few draws of a prior for their corrections."""
    if p.num_samples is not None and p.num_samples < p.dim + 3:
        raise ValueError(f"num_prior_samples must be at least {p.dim + 3} for {p.dim} values, got {p.num_samples}")


def normal_kl(q: Moments, factor_q: Tensor, p: Moments, factor_p: Tensor, noise: float = 0.0) -> Tensor:
    """The KL divergence of each block, ``[B]``, corrected for what is sampled.

    :param Moments q: of draws, or known.
    :param Tensor factor_q: the Cholesky factors of their covariances with the noise added.
    :param Moments p: of the prior, known or sampled.
    :param Tensor factor_p: likewise.
    :param float noise: the variance of independent noise on the values of both.
    """
    inverse = torch.cholesky_inverse(factor_p)
    constant: Tensor | float = 0.0
    spread_of_mean = 0.0
    log_det_p, log_det_q = _log_det(factor_p), _log_det(factor_q)
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


def _trace_of_product(matrix: Tensor, moments: Moments) -> Tensor:
    return (matrix * moments.covariance).sum((-2, -1))


def _log_det(factor: Tensor) -> Tensor:
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
