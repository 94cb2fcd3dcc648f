# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL divergence between normal distributions with more noise on both, finite where that of functions is not."""

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.functional.divergences.gaussian_kl import GaussianKL
from pyro_radial.functional.divergences.moments import Moments, normal_kl
from pyro_radial.functional.gaussian import with_diagonal

__all__ = ["RegularizedKL"]


class RegularizedKL(GaussianKL):
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

    :param float gamma: the variance of the noise, per point, in squared units of the function values.
    :param bool factorize: as in :class:`GaussianKL`.
    :param int num_prior_samples: as there.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional import GaussianProcess
        >>> x, prior = torch.linspace(0, 1, 40).unsqueeze(-1), GaussianProcess(RBF(1))
        >>> f = torch.randn(30, 1, 1) * x  # straight lines: singular, and fewer than points
        >>> bool(RegularizedKL(gamma=1e-3)(f, x, prior).value.isfinite())
        True
    """

    def __init__(self, gamma: float, factorize: bool = False, num_prior_samples: int = 1000) -> None:
        super().__init__(factorize, num_prior_samples)
        self.gamma = positive_float("gamma", gamma)

    def _kl(self, q: Moments, p: Moments, num_points: int) -> Tensor:
        noise = self.gamma * num_points
        factors = [torch.linalg.cholesky_ex(with_diagonal(moments.covariance, noise)).L for moments in (q, p)]
        return normal_kl(q, factors[0], p, factors[1], noise)
