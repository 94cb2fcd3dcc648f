# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL divergence between a process with known moments and a prior."""

from torch import Tensor

from pyro_radial._pyro.checks import non_negative_float, positive_count
from pyro_radial.functional.divergences.estimate import (
    DivergenceEstimate,
    FunctionDistribution,
    ProcessDivergence,
)
from pyro_radial.functional.divergences.gaussian import (
    known_moments,
    moments_of_prior,
    normal_kl,
)
from pyro_radial.functional.gaussian import JITTER, cholesky, with_diagonal
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_points

MIN_VARIANCE = 1e-6  # of function values


class LinearizedKL(ProcessDivergence):
    r"""The KL divergence between the normal distributions of a linearized model and a prior, at all points jointly.

    With the model linearized at the means :math:`\mu` of its weights, which have covariance :math:`\Sigma`, and a prior
    with moments :math:`m, K`, for each output

    .. math:: KL\big( \mathcal N(f_\mu(X), J \Sigma J^T + \gamma N I)\ \|\ \mathcal N(m(X), K + \gamma N I) \big),

    with N points and independent outputs. It is exact for a model that is linear in its weights, and good for others if
    the standard deviations of the weights are small. It has no noise from draws, and takes any number of points.

    A prior that is not Gaussian is represented by the moments of draws, corrected as in
    :class:`~pyro_radial.functional.GaussianKL`. The prior's ``noise`` is added to both. The guide may have a normal
    distribution for each site, or draw all sites as one normal vector. The Jacobian has N O numbers for each weight.
    With fewer weights than points the divergence is infinite without noise: use :math:`\gamma` or a prior with
    ``noise``.

    Source: Rudner, Chen, Teh and Gal (2022), "Tractable Function-Space Variational Inference in Bayesian Neural
    Networks", for the moments; Cinquin and Bamler (2025), "Well-Defined Function-Space Variational Inference in
    Bayesian Neural Networks via Regularized KL-Divergence" (arXiv 2406.04317), section 4, for the noise.

    :param float gamma: the variance of the noise per point, in squared units of the function values; zero for none.
    :param int num_prior_samples: draws of a prior that is not Gaussian, more than the number of points plus two.
    :raises ValueError: naming the argument that does not fit; when called, for too few draws of a prior and for a
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
        self.gamma = non_negative_float("gamma", gamma)
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(
        self, process: FunctionDistribution, x: Tensor, prior: FunctionPrior
    ) -> DivergenceEstimate:
        """Return the divergence, as a surrogate and a value in the dtype of the points."""
        check_points(x)
        if not hasattr(process, "moments"):
            raise ValueError(
                f"process must have a method moments(), as PosteriorProcess has, got {process!r}"
            )
        mean, covariance = process.moments(x)
        noise = self.gamma * len(x)
        q = known_moments(mean, with_diagonal(covariance, noise + prior.noise**2), factorize=True)
        p = moments_of_prior(prior, x, mean.shape[-1], True, self.num_prior_samples)
        factor_p = cholesky(with_diagonal(p.covariance, noise), JITTER)
        try:
            factor = cholesky(q.covariance, JITTER)
        except ValueError as error:
            raise ValueError(
                f"the process must have a covariance with a Cholesky factor at {len(x)} points, got none: give "
                "LinearizedKL a gamma, or the prior noise"
            ) from error
        return normal_kl(q, factor, p, factor_p, x.dtype)


def kl_of_marginals(moments: tuple[Tensor, Tensor], prior_moments: tuple[Tensor, Tensor]) -> Tensor:
    """Return the sum of the KL divergences between normals with means and variances ``[N, O]``, in float64."""
    mean, variance = (moment.double() for moment in moments)
    prior_mean, prior_variance = (moment.double() for moment in prior_moments)
    prior_variance = prior_variance.clamp_min(MIN_VARIANCE)
    ratio = variance.clamp_min(MIN_VARIANCE) / prior_variance
    gap = (mean - prior_mean).square()
    return 0.5 * (ratio + gap / prior_variance - 1.0 - ratio.log()).sum()
