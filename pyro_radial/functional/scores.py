# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

r"""Scores of distributions that are known by their samples: estimates of :math:`\nabla_f \log q(f)`."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial.functional.gaussian import with_diagonal
from pyro_radial.functional.whitening import Shrinkage, White, check_shrinkage, whiten

__all__ = ["GaussianScore", "ScoreEstimator", "SpectralSteinScore", "SteinScore"]

#: A function ``estimator(samples, at=None)`` of draws ``[S, K]`` that returns ``[T, K]``: the score of the distribution
#: of the draws at the values ``at``, ``[T, K]``, or at the draws themselves. It keeps nothing between calls, and its
#: result is a constant to autograd, in the dtype of the draws; inside all is float64.
#:
#: Every estimator here works in coordinates in which the draws are white. So it is equivariant: draws in other units,
#: or mixed by any invertible matrix, have the same score in those. A kernel of one width for all directions, as
#: published, does not see those in which values at neighboring points differ, where the score of a smooth function's
#: values is largest. At the draws themselves and elsewhere an estimate has different errors: see
#: :class:`GaussianScore`.
ScoreEstimator = Callable[..., Tensor]


class GaussianScore:
    r"""The score of the normal distribution with the draws' mean m and covariance C.

    .. math:: \hat s(f) = -c\, C^{-1} (f - m).

    At values independent of the n draws in d dimensions, :math:`c = (n - d - 2) / (n - 1)` makes it unbiased for normal
    draws (Hartlap, Simon and Schneider 2007, eq. 17, who use :math:`n - 1` degrees of freedom for C). At the draws
    themselves that factor would be wrong, for a draw is nearer to the mean by a metric that it had a part in.
    There :math:`c = n / (n - 1)` is exact: then :math:`\frac1n \sum_i \hat s(f_i) (f_i - m)^T = -I`, which is Stein's
    identity, and the gradient that it gives of the entropy of a normal distribution is that of
    :math:`\tfrac12 \log\det C`, with nothing lost.

    :param shrinkage: None, or ``"oas"``: C is shrunk to a multiple of the identity as far as the draws suggest (Chen,
        Wiesel, Eldar and Hero 2010, "Shrinkage algorithms for MMSE covariance estimation", eq. 23), which any two draws
        suffice for. Then c is 1 elsewhere, and at the draws what makes the trace of the identity above right.
    :raises ValueError: naming ``shrinkage``; when called, naming ``samples`` or ``at`` if they do not fit, or
        if there are fewer than d + 3 draws and no shrinkage.

    Example::

        >>> draws = torch.randn(1000, 3)
        >>> score = GaussianScore()(draws)
        >>> torch.allclose((score * draws).sum(-1).mean(), torch.tensor(-3.0), atol=1e-4)
        True
    """

    def __init__(self, shrinkage: Shrinkage = None) -> None:
        self.shrinkage = check_shrinkage(shrinkage)

    @torch.no_grad()
    def __call__(self, samples: Tensor, at: Tensor | None = None) -> Tensor:
        """The estimated score ``[T, K]``."""
        white = whiten(samples, at, self.shrinkage)
        return white.score(_gaussian_score(white, white.at, at is None), samples)


class SteinScore:
    r"""Stein's identity solved by ridge regression, with what the draws do not say left to the normal distribution.

    The score satisfies :math:`E[k(f, \cdot) s(f) + \nabla_f k(f, \cdot)] = 0` for every kernel k. Let K be the kernel's
    matrix of the n draws X, and :math:`b(z) = \sum_i \nabla_{x_i} k(x_i, z)`. The solution with the least sum of errors
    and :math:`\rho` times the squared norm of :math:`s - g` in the kernel's space is, with :math:`\eta = n \rho`,

    .. math:: \hat s(z) = g(z) + \tfrac1\eta \big( h(z) - k(z, X) (K + \eta I)^{-1} h(X) \big), \qquad
        h(z) = -b(z) - k(z, X) g(X).

    Here g is that of :class:`GaussianScore`: right for normal draws, and the kernel corrects it for others. The
    kernel is Gaussian, its width the median distance of white draws.

    Source: with :math:`g = 0` and at the draws this is the estimator of Li and Turner (2018), "Gradient estimators for
    implicit models", section 3, :math:`-(K + \eta I)^{-1} b(X)`; elsewhere it is the Tikhonov estimator of Zhou, Shi
    and Zhu (2020), "Nonparametric score estimators", section 3, with a diagonal kernel. Shrunk to zero, it misses most
    of the score in 60 dimensions.

    :param float ridge: :math:`\rho`.
    :param shrinkage: of the covariance, as in :class:`GaussianScore`.
    :raises ValueError: naming ``ridge`` or ``shrinkage``; when called, as :class:`GaussianScore`.

    Example::

        >>> draws = torch.randn(2000, 1) + 2.0 * torch.randn(2000, 1).sign()  # two modes
        >>> (SteinScore()(draws, at=torch.tensor([[1.5], [-1.5]])) > 0).flatten()  # uphill is outward
        tensor([ True, False])
    """

    def __init__(self, ridge: float = 0.01, shrinkage: Shrinkage = None) -> None:
        self.ridge = positive_float("ridge", ridge)
        self.shrinkage = check_shrinkage(shrinkage)

    @torch.no_grad()
    def __call__(self, samples: Tensor, at: Tensor | None = None) -> Tensor:
        """The estimated score ``[T, K]``."""
        white = whiten(samples, at, self.shrinkage)
        width, eta = _median_distance(white.samples), self.ridge * len(samples)
        base = _gaussian_score(white, white.samples, True)

        def residual(z: Tensor) -> tuple[Tensor, Tensor]:
            kernel, slope = _kernel_and_slope(z, white.samples, width)
            return kernel, -slope - kernel @ base

        kernel, h = residual(white.samples)
        solution = torch.cholesky_solve(h, torch.linalg.cholesky_ex(with_diagonal(kernel, eta)).L)
        if at is None:
            return white.score(base + solution, samples)
        kernel, h = residual(white.at)
        return white.score(_gaussian_score(white, white.at, False) + (h - kernel @ solution) / eta, samples)


class SpectralSteinScore:
    r"""The spectral Stein gradient estimator: the score's coefficients in eigenfunctions of a kernel.

    .. math:: \hat s(z) = \sum_{j \le J} \beta_j \psi_j(z), \qquad
        \psi_j(z) = \frac{\sqrt n}{\lambda_j + \eta} \sum_i u_{ij} k(z, x_i), \qquad
        \beta_j = -\frac1n \sum_i \nabla \psi_j(x_i),

    where :math:`\lambda_j` and :math:`u_j` are the eigenvalues (largest first) and eigenvectors of the kernel's matrix
    of the n draws, and :math:`\eta` is ``ridge`` times n. J is the least number of eigenvalues whose share in their
    sum reaches the threshold, hence at least one.

    The ridge shrinks the score: the slope of its estimate on the true score of normal distributions is 0.79 in the
    mean, that of the published code 0.57, that of :class:`SteinScore` 0.98
    (``benchmarks/functional/score_estimators.py``, at the draws).

    Source: Shi, Sun and Zhu (2018), "A spectral approach to gradient estimation for implicit distributions", section
    3, where :math:`\eta = 0` and draws are not white. The published code leaves out the eigenvalue that crosses
    the threshold, takes all of them where that leaves none, and keeps J of the first call for all later ones.

    :param int num_eigenfunctions: J, or None to leave it to the threshold.
    :param float threshold: in (0, 1].
    :param float ridge: at least 0; eigenvalues that are not kept away from zero make it blow up.
    :param width: of the Gaussian kernel for white draws; ``"median"`` is the median of their distances, in each call.
    :param shrinkage: of the covariance, as in :class:`GaussianScore`.
    :raises ValueError: naming the argument; when called, as :class:`GaussianScore`, and if there are fewer draws
        than ``num_eigenfunctions``.

    Example::

        >>> draws = torch.randn(500, 2)
        >>> score = SpectralSteinScore()(draws)
        >>> bool(torch.nn.functional.cosine_similarity(score, -draws).mean() > 0.9)
        True
    """

    def __init__(
        self,
        num_eigenfunctions: int | None = None,
        threshold: float = 0.99,
        ridge: float = 1e-3,
        width: float | Literal["median"] = "median",
        shrinkage: Shrinkage = None,
    ) -> None:
        if num_eigenfunctions is not None:
            positive_count("num_eigenfunctions", num_eigenfunctions)
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold must be in (0, 1], got {threshold!r}")
        self.num_eigenfunctions, self.threshold = num_eigenfunctions, threshold
        self.ridge = 0.0 if ridge == 0 else positive_float("ridge", ridge)
        self.width = width if width == "median" else positive_float("width", width)
        self.shrinkage = check_shrinkage(shrinkage)

    @torch.no_grad()
    def __call__(self, samples: Tensor, at: Tensor | None = None) -> Tensor:
        """The estimated score ``[T, K]``."""
        white = whiten(samples, at, self.shrinkage)
        num_samples = len(samples)
        if self.num_eigenfunctions is not None and num_samples < self.num_eigenfunctions:
            raise ValueError(
                f"samples must be at least num_eigenfunctions = {self.num_eigenfunctions} draws, got {num_samples}"
            )
        width = _median_distance(white.samples) if self.width == "median" else white.samples.new_tensor(self.width)
        kernel, slope = _kernel_and_slope(white.samples, white.samples, width)
        eigenvalues, vectors = (part.flip(-1) for part in torch.linalg.eigh(kernel))
        weights = torch.where(self._kept(eigenvalues), (eigenvalues + self.ridge * num_samples) ** -2, 0.0)
        coefficients = weights[:, None] * (vectors.mT @ slope)
        kernel = kernel if at is None else _kernel_and_slope(white.at, white.samples, width)[0]
        return white.score(-kernel @ (vectors @ coefficients), samples)

    def _kept(self, eigenvalues: Tensor) -> Tensor:
        """Which eigenfunctions are used, without a host-device synchronization."""
        if self.num_eigenfunctions is not None:
            return torch.arange(len(eigenvalues), device=eigenvalues.device) < self.num_eigenfunctions
        share = eigenvalues / eigenvalues.sum()
        # The share of all before it: what crosses the threshold is kept. Rounding makes the last ones negative.
        return (share.cumsum(0) - share < self.threshold) & (eigenvalues > 0)


def _gaussian_score(white: White, values: Tensor, at_samples: bool) -> Tensor:
    """The score of the draws' normal distribution in white coordinates, corrected as :class:`GaussianScore` says."""
    num_samples, dim = white.samples.shape
    if white.shrunk:
        return -values * (dim * num_samples / white.samples.square().sum() if at_samples else 1.0)
    return -values * (num_samples if at_samples else num_samples - dim - 2) / (num_samples - 1)


def _kernel_and_slope(z: Tensor, samples: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """The Gaussian kernel ``[T, S]``, and its gradient in the draws, summed over them, ``[T, K]``."""
    distance = z.square().sum(-1, keepdim=True) + samples.square().sum(-1) - 2.0 * z @ samples.mT
    kernel = (-0.5 * distance.clamp_min(0.0) / width**2).exp()
    return kernel, (z * kernel.sum(-1, keepdim=True) - kernel @ samples) / width**2


def _median_distance(samples: Tensor) -> Tensor:
    median = torch.nn.functional.pdist(samples).median()
    # Most draws may be equal to each other.
    return torch.where(median > 0, median, 1.0)
