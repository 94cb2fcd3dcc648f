# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The spectral Stein gradient estimator, to compare with the estimators of the package."""

import torch
from torch import Tensor

from pyro_radial.functional.scores import _kernel_and_slope, _median_distance, _whiten

__all__ = ["SpectralSteinScore"]


class SpectralSteinScore:
    r"""The score's coefficients in eigenfunctions of a kernel.

    .. math:: \hat s(z) = \sum_{j \le J} \beta_j \psi_j(z), \qquad
        \psi_j(z) = \frac{\sqrt n}{\lambda_j + \eta} \sum_i u_{ij} k(z, x_i), \qquad
        \beta_j = -\frac1n \sum_i \nabla \psi_j(x_i),

    with the eigenvalues :math:`\lambda_j` (largest first) and eigenvectors :math:`u_j` of the kernel matrix of the n
    draws, and :math:`\eta` equal to ``ridge`` times n. J is the least number of eigenvalues that reach the threshold's
    share of their sum. The ridge shrinks the score; without it, small eigenvalues make the estimate explode.

    Source: Shi, Sun and Zhu (2018), "A spectral approach to gradient estimation for implicit distributions", section 3,
    with :math:`\eta = 0` and draws that are not white. Their code omits the eigenvalue that crosses the threshold, uses
    all if none is left, and reuses the J of the first call.

    :param float threshold: in (0, 1].
    :param float ridge: at least 0.
    """

    def __init__(self, threshold: float = 0.99, ridge: float = 1e-3) -> None:
        self.threshold = threshold
        self.ridge = ridge

    @torch.no_grad()
    def __call__(self, samples: Tensor, at: Tensor | None = None) -> Tensor:
        """The estimated score ``[T, K]``."""
        white = _whiten(samples, at)
        width = _median_distance(white.samples)
        kernel, slope = _kernel_and_slope(white.samples, white.samples, width)
        eigenvalues, vectors = (part.flip(-1) for part in torch.linalg.eigh(kernel))
        share = eigenvalues / eigenvalues.sum()
        # The eigenvalue that crosses the threshold is kept. Rounding makes the last ones negative.
        kept = (share.cumsum(0) - share < self.threshold) & (eigenvalues > 0)
        weights = torch.where(kept, (eigenvalues + self.ridge * len(samples)) ** -2, 0.0)
        coefficients = weights[:, None] * (vectors.mT @ slope)
        kernel = kernel if at is None else _kernel_and_slope(white.at, white.samples, width)[0]
        return white.score(-kernel @ (vectors @ coefficients), samples)
