# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The sum over points of the KL divergence between normal marginals, of a process that is known and a prior."""

from torch import Tensor

from pyro_radial._pyro.checks import positive_float
from pyro_radial.functional.checks import check_points
from pyro_radial.functional.divergences.estimate import DivergenceEstimate, Process, ProcessDivergence
from pyro_radial.functional.priors.function_prior import FunctionPrior

__all__ = ["MIN_VARIANCE", "MarginalKL", "kl_of_marginals"]

MIN_VARIANCE = 1e-6


class MarginalKL(ProcessDivergence):
    r"""The KL divergence between the normal marginals of two processes, summed over points and outputs.

    With means m and variances v of the function values of one, and :math:`m_0, v_0` of the prior,

    .. math:: \tfrac12 \sum_{n, o} \Big[ \frac{v_{no} + (m_{no} - m_{0,no})^2}{v_{0,no}} - 1
        + \log\frac{v_{0,no}}{v_{no}} \Big].

    It is no KL divergence between processes, nor between their values at the points jointly: as if these were
    independent, each point counts in full, however much it knows of its neighbors. So the sum grows with the number of
    points, and **a loss with it is a regularized one and no bound on the log evidence**, at any weight. What it is good
    for is that it needs no draws and no covariances: the moments are those of the model linearized at the means of its
    weights, its gradient is exact, through the Jacobian too, and its cost linear in the number of points.

    :class:`~pyro_radial.infer.FunctionalELBO` gives it the process of the guide; as a function it takes any two, such
    as two :class:`~pyro_radial.functional.PosteriorProcess`. The prior may be any Gaussian one, whose ``noise`` counts
    for both.

    Source: Rudner, Bickford Smith, Feng, Teh and Gal (2022), "Continual Learning via Sequential Function-Space
    Variational Inference", whose divergence is one of all points jointly: here covariances between them are left out.

    :param float min_variance: variances smaller than this count as this, in squared units of the function values. A
        function value that no weight moves, as behind units that are off, has a variance of zero, and its divergence
        would be infinite.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> import torch
        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional import GaussianProcess
        >>> x, prior = torch.rand(5, 1), GaussianProcess(RBF(1))
        >>> wider = GaussianProcess(RBF(1, variance=torch.tensor(4.0)))
        >>> value = MarginalKL()(wider, x, prior).value
        >>> bool(torch.isclose(value, 5 * 0.5 * (4.0 - 1.0 - torch.tensor(4.0).log())))
        True
    """

    def __init__(self, min_variance: float = MIN_VARIANCE) -> None:
        self.min_variance = positive_float("min_variance", min_variance)

    def __call__(self, process: Process, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """The divergence, as a surrogate and a value in the dtype of the points."""
        check_points(x)
        mean, variance = process.marginals(x)
        prior_mean, prior_variance = prior.marginals(x, mean.shape[-1])
        variance = variance.double() + prior.noise**2
        divergence = kl_of_marginals((mean, variance), (prior_mean, prior_variance), self.min_variance).to(x.dtype)
        return DivergenceEstimate(divergence, divergence.detach())


def kl_of_marginals(
    moments: tuple[Tensor, Tensor], prior_moments: tuple[Tensor, Tensor], min_variance: float = MIN_VARIANCE
) -> Tensor:
    """The sum of the KL divergences between normals, in float64.

    :param moments: means and variances ``[N, O]``.
    :param prior_moments: those of the prior.
    :param float min_variance: variances smaller than this count as this.
    """
    mean, variance = (part.double() for part in moments)
    prior_mean, prior_variance = (part.double() for part in prior_moments)
    prior_variance = prior_variance.clamp_min(min_variance)
    ratio = variance.clamp_min(min_variance) / prior_variance
    gap = (mean - prior_mean).square()
    return 0.5 * (ratio + gap / prior_variance - 1.0 - ratio.log()).sum()
