# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Normal vectors with a covariance that may be close to singular: factors and densities."""

import math

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_radial._pyro.compat import is_capturing

#: The least jitter on the diagonal of a covariance, times its mean diagonal.
JITTER = 1e-8
#: Multiples of the jitter to try in turn until a covariance has a Cholesky factor.
JITTER_LADDER = (1.0, 1e2, 1e4)


def cholesky(covariance: Tensor, jitter: float = JITTER) -> Tensor:
    """Return the Cholesky factor of covariances ``[..., N, N]`` with as little jitter as it takes.

    Whether a factor exists is read on the host, as in :func:`torch.linalg.cholesky`. While a graph is recorded nothing
    is read: all jitters are tried, and a covariance without a factor gives NaN.
    """
    scale = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    if is_capturing():
        return _cholesky_unread(covariance, jitter * scale)
    if is_validation_enabled():
        asymmetry = (covariance - covariance.mT).abs().amax((-2, -1))
        if bool((asymmetry > 1e-6 * scale.abs()).any()):
            raise ValueError(
                "kernel must be symmetric, got covariances of a set of points that are not"
            )
    for rung in JITTER_LADDER:
        factor, info = torch.linalg.cholesky_ex(
            with_diagonal(covariance, (jitter * rung * scale)[..., None])
        )
        if not bool(info.any() | factor.isnan().any()):
            return factor
    if not bool(covariance.isfinite().all()):
        raise ValueError("kernel must give finite covariances, got NaN or infinity")
    least = float(torch.linalg.eigvalsh(covariance.detach()).min())
    raise ValueError(
        f"kernel must be positive definite, got covariances of {covariance.shape[-1]} points with an eigenvalue of "
        f"{least:.3g}; jitter up to {jitter * JITTER_LADDER[-1]:.0e} times their mean diagonal does not help"
    )


def _cholesky_unread(covariance: Tensor, jitter: Tensor) -> Tensor:
    """Return the Cholesky factor with the least jitter that gives one, without reading any value on the host."""
    with torch.no_grad():
        rung = torch.full_like(jitter, JITTER_LADDER[-1])
        for smaller in reversed(JITTER_LADDER[:-1]):
            factor, info = torch.linalg.cholesky_ex(
                with_diagonal(covariance, (jitter * smaller)[..., None])
            )
            works = ~(info.any() | factor.isnan().any())
            rung = torch.where(works, smaller, rung)
    return torch.linalg.cholesky_ex(with_diagonal(covariance, (jitter * rung)[..., None]))[0]


def gaussian_log_prob(
    f: Tensor, mean: Tensor, covariance: Tensor, jitter: float = JITTER
) -> Tensor:
    """Return the log-density ``[S]`` of values ``[S, N, O]`` with mean ``[N, O]`` and covariances ``[O, N, N]``."""
    factor = cholesky(distinct_covariances(covariance), jitter)
    residual = (f.double() - mean).permute(2, 1, 0)
    white = torch.linalg.solve_triangular(factor, residual, upper=False)
    half_log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).expand(mean.shape[-1]).sum()
    constant = 0.5 * mean.numel() * math.log(2.0 * math.pi)
    return (-0.5 * white.square().sum((0, 1)) - half_log_det - constant).to(f.dtype)


def with_diagonal(covariance: Tensor, addend: Tensor | float) -> Tensor:
    """Return covariances ``[..., N, N]`` with a number, or a tensor ``[...]``, added on their diagonals."""
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return covariance + (addend[..., None] if isinstance(addend, Tensor) else addend) * eye


def distinct_covariances(covariance: Tensor) -> Tensor:
    """Return the one covariance ``[1, N, N]`` that all outputs share, to factor it once, or else all of them."""
    return covariance[:1] if covariance.stride(0) == 0 else covariance
