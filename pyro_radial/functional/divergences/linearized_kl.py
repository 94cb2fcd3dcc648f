# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL divergence between a process that is known at points jointly and a Gaussian prior."""

from torch import Tensor

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial.functional.checks import check_points
from pyro_radial.functional.divergences.estimate import DivergenceEstimate, Process, ProcessDivergence
from pyro_radial.functional.divergences.moments import check_enough_of_prior, known_moments, moments_of_prior, normal_kl
from pyro_radial.functional.gaussian import JITTER, cholesky, with_diagonal
from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["LinearizedKL"]


class LinearizedKL(ProcessDivergence):
    r"""The KL divergence between the normal distributions of a linearized model and of a prior, at all points jointly.

    With the model linearized at the means :math:`\mu` of its weights, of covariance :math:`\Sigma`, and a prior with
    moments :math:`m, K`, for each output

    .. math:: KL\big( \mathcal N(f_\mu(X), J \Sigma J^T + \gamma N I)\ \|\ \mathcal N(m(X), K + \gamma N I) \big),

    N points and outputs that are independent. It is what :class:`~pyro_radial.functional.GaussianKL` estimates from
    draws, or :class:`~pyro_radial.functional.RegularizedKL` where :math:`\gamma > 0`, without their noise and at any
    number of points, and exact for a model that is linear in its weights. Of another model it is that of the linearized
    one, whose functions are not those that are drawn: good where the weights' standard deviations are small.

    A prior that is not Gaussian is taken by the moments of draws of it, corrected for their number as in
    :class:`~pyro_radial.functional.GaussianKL`: the process is compared with the normal distribution nearest to the
    prior, which knows how far and how smoothly the prior's functions vary, and nothing of their form. A prior's
    ``noise`` counts for both. The guide may be factorized, have a normal distribution for each site, or draw all sites
    as one normal vector, as Pyro's ``AutoLowRankMultivariateNormal`` does: its covariance is never formed. The Jacobian
    is held at all points: N O numbers for each weight. A network with fewer weights than there are points has a
    singular covariance there, and its divergence is infinite without noise: then take :math:`\gamma`, or a prior with
    ``noise``.

    Source: Rudner, Chen, Teh and Gal (2022), "Tractable Function-Space Variational Inference in Bayesian Neural
    Networks", for the moments; Cinquin and Bamler (2025), "Well-Defined Function-Space Variational Inference in
    Bayesian Neural Networks via Regularized KL-Divergence" (arXiv 2406.04317), section 4, for the noise.

    :param float gamma: the variance of the noise, per point, in squared units of the function values; zero for none.
    :param int num_prior_samples: draws of a prior that is not Gaussian, more than the number of points and two.
    :raises ValueError: naming the argument that does not fit; when called, for too few draws of a prior, and for a
        covariance without a Cholesky factor.

    Example::

        >>> import torch
        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional import GaussianProcess
        >>> x, prior = torch.linspace(0, 4, 5).unsqueeze(-1), GaussianProcess(RBF(1))
        >>> wider = GaussianProcess(RBF(1, variance=torch.tensor(4.0)))
        >>> value = LinearizedKL()(wider, x, prior).value
        >>> bool(torch.isclose(value, 5 * 0.5 * (4.0 - 1.0 - torch.tensor(4.0).log())))
        True
    """

    def __init__(self, gamma: float = 0.0, num_prior_samples: int = 1000) -> None:
        self.gamma = 0.0 if gamma == 0 else positive_float("gamma", gamma)
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(self, process: Process, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The divergence, as a surrogate and a value in the dtype of the points."""
        check_points(x)
        mean, covariance = process.moments(x)
        noise = self.gamma * len(x)
        q = known_moments(mean, with_diagonal(covariance, noise + prior.noise**2), factorize=True)
        p = moments_of_prior(prior, x, mean.shape[-1], True, self.num_prior_samples)
        check_enough_of_prior(p)
        factor_p = cholesky(with_diagonal(p.covariance, noise), JITTER)
        try:
            factor = cholesky(q.covariance, JITTER)
        except ValueError as error:
            raise ValueError(
                f"the process must have a covariance with a Cholesky factor at {len(x)} points, got none: give "
                "LinearizedKL a gamma, or the prior noise"
            ) from error
        divergence = normal_kl(q, factor, p, factor_p).sum().to(x.dtype)
        return DivergenceEstimate(divergence, divergence.detach())
