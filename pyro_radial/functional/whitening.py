# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Coordinates in which draws are white, for estimates that depend on no units."""

from typing import Literal, NamedTuple

import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor

from pyro_radial.functional.checks import check_floating
from pyro_radial.functional.gaussian import JITTER, with_diagonal

__all__ = ["Shrinkage", "White", "check_shrinkage", "whiten"]

#: None, or the name of a way to shrink a covariance to a multiple of the identity.
Shrinkage = Literal["oas"] | None


class White(NamedTuple):
    """Draws with mean zero and unit covariance, other values in their coordinates, and the way back."""

    #: The draws, ``[S, K]``.
    samples: Tensor
    #: The other values, ``[T, K]``, or the draws where there are none.
    at: Tensor
    #: The lower Cholesky factor ``[K, K]`` of the covariance of the draws.
    factor: Tensor
    #: Whether that covariance was shrunk.
    shrunk: bool

    def score(self, score: Tensor, like: Tensor) -> Tensor:
        """A score in white coordinates as one in those of the draws, in their dtype."""
        return torch.linalg.solve_triangular(self.factor, score, upper=False, left=False).to(like.dtype)


def whiten(samples: Tensor, at: Tensor | None, shrinkage: Shrinkage) -> White:
    """Draws, and values in their coordinates, in float64.

    :param Tensor samples: draws ``[S, K]``.
    :param Tensor at: values ``[T, K]``, or None for the draws themselves.
    :param shrinkage: of the covariance; see :class:`~pyro_radial.functional.GaussianScore`.
    :raises ValueError: naming ``samples`` or ``at`` if they do not fit, or if there are fewer than K + 3 draws and no
        shrinkage.
    """
    _check_values(samples, at)
    num_samples, dim = samples.shape
    least = dim + 3 if shrinkage is None else 2
    if num_samples < least:
        hint = " without shrinkage='oas'" if shrinkage is None else ""
        raise ValueError(f"samples must be at least {least} draws of {dim} values{hint}, got {num_samples}")
    values = samples.double()
    centered = values - values.mean(0)
    covariance = centered.mT @ centered / (num_samples - 1)
    mean_variance = covariance.diagonal().mean()
    if is_validation_enabled() and not bool((mean_variance > 0) & mean_variance.isfinite()):
        raise ValueError(
            f"samples must be finite and not all equal, got a variance of {float(mean_variance)}: a distribution at "
            "one point has no score"
        )
    if shrinkage is not None and dim > 1:
        covariance = _shrink(covariance, num_samples - 1)
    # Draws may have fewer degrees of freedom than values.
    factor = torch.linalg.cholesky_ex(with_diagonal(covariance, JITTER * mean_variance)).L

    def transform(residual: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor.mT, residual, upper=True, left=False)

    white = transform(centered)
    elsewhere = white if at is None else transform(at.double() - values.mean(0))
    return White(white, elsewhere, factor, shrinkage is not None)


def check_shrinkage(shrinkage: Shrinkage) -> Shrinkage:
    """The shrinkage, or a ValueError that names it."""
    if shrinkage not in (None, "oas"):
        raise ValueError(f"shrinkage must be None or 'oas', got {shrinkage!r}")
    return shrinkage


def _shrink(covariance: Tensor, degrees: int) -> Tensor:
    """The oracle-approximating mixture with the identity, of the same trace."""
    dim = len(covariance)
    trace, squares = covariance.trace(), covariance.square().sum()
    numerator = (1.0 - 2.0 / dim) * squares + trace**2
    share = numerator / ((degrees + 1.0 - 2.0 / dim) * (squares - trace**2 / dim))
    # The square's trace exceeds its least value by rounding alone for a multiple of the identity.
    share = torch.where(squares > trace**2 / dim, share, 1.0).clamp(max=1.0)
    return with_diagonal((1.0 - share) * covariance, share * trace / dim)


def _check_values(samples: Tensor, at: Tensor | None) -> None:
    """Values ``[S, K]`` and ``[T, K]``, or a ValueError that names the argument."""
    for name, values in (("samples", samples), ("at", at)):
        if values is None:
            continue
        check_floating(name, values)
        if values.dim() != 2 or values.shape[1] != samples.shape[-1] or values.shape[1] == 0:
            raise ValueError(f"{name} must be values of shape [S, K], got shape {list(values.shape)}")
