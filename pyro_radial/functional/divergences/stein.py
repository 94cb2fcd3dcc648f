# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The gradient of the KL divergence, from the scores of both distributions."""

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial.functional.divergences.estimate import DivergenceEstimate
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_function_values
from pyro_radial.functional.scores import ScoreEstimator, SteinScore


class SteinKL:
    r"""The gradient of the KL divergence from the scores of both distributions, which may have any form.

    Since the expected score of a distribution is zero, for reparameterized draws f of q

    .. math:: \nabla_\phi KL(q \| p) = E\big[ \nabla_\phi f \cdot (\nabla_f \log q(f) - \nabla_f \log p(f)) \big].

    The surrogate is the mean over draws of :math:`f \cdot (s_q - s_p)` with both scores held fixed. The score of q is
    estimated from its draws. The score of p is the prior's own if it has one. Otherwise it is estimated from draws of
    the prior, and few of these may be near the draws of q. The value of the divergence is not estimated.

    Source: Sun et al. (2019), "Functional Variational Bayesian Neural Networks", section 3.1.

    :param estimator: a function ``estimator(samples, at=None)`` of draws ``[S, K]`` that returns the score of their
        distribution at the values ``at``, ``[T, K]``, or at the draws. The default solves Stein's identity around the
        normal distribution of the draws: it is right for normal distributions and follows others.
    :param int num_prior_samples: draws of a prior without a known score.
    :raises ValueError: naming the argument that does not fit, and if the estimator has too few draws.

    Example::

        >>> from pyro.contrib.gp.kernels import RBF
        >>> from pyro_radial.functional import GaussianProcess
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> log_scale = torch.zeros((), requires_grad=True)
        >>> f = log_scale.exp() * torch.randn(1000, 3, 1)
        >>> SteinKL()(f, x, GaussianProcess(RBF(1), noise=1.0)).surrogate.backward()
        >>> bool(log_scale.grad < 0)  # the distribution is too narrow
        True
    """

    def __init__(
        self, estimator: ScoreEstimator | None = None, num_prior_samples: int = 500
    ) -> None:
        self.estimator: ScoreEstimator = SteinScore() if estimator is None else estimator
        self.num_prior_samples = positive_count("num_prior_samples", num_prior_samples)

    def __call__(self, f: Tensor, x: Tensor, prior: FunctionPrior) -> DivergenceEstimate:
        """Return the surrogate; the value is None."""
        check_function_values(f, x)
        values = f.detach().double()
        with torch.no_grad():
            score = self.estimator(values.flatten(1)).view_as(values) - self._prior_score(
                values, x, prior
            )
        surrogate = (f * score.to(f.dtype)).sum((-2, -1)).mean()
        return DivergenceEstimate(surrogate, None)

    def _prior_score(self, values: Tensor, x: Tensor, prior: FunctionPrior) -> Tensor:
        try:
            return prior.score(values, x)
        except NotImplementedError:
            draws = prior.sample(x, self.num_prior_samples, values.shape[-1]).double()
            return self.estimator(draws.flatten(1), values.flatten(1)).view_as(values)
