# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How a surrogate says where to evaluate next, by the acquisition functions of BoTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    from botorch.acquisition import AcquisitionFunction, PosteriorMean, qLogExpectedImprovement, qUpperConfidenceBound
    from botorch.acquisition.max_value_entropy_search import qLowerBoundMaxValueEntropy, qMaxValueEntropy
except ImportError as error:
    raise ImportError("Bayesian optimization needs BoTorch: pip install 'pyro-radial[bo]'") from error

from pyro_radial.decisions.surrogates import Surrogate

__all__ = [
    "Acquisition",
    "gibbon",
    "log_expected_improvement",
    "max_value_entropy",
    "thompson",
    "upper_confidence_bound",
]

#: A function of a trained surrogate and what it was trained on, points ``[N, D]`` in the unit cube and values
#: ``[N, 1]``, that returns an acquisition function to maximize.
Acquisition = Callable[[Surrogate, Tensor, Tensor], AcquisitionFunction]

NUM_DRAWS = 64
NUM_CANDIDATES = 256
NUM_MAXIMA = 10


def thompson(surrogate: Surrogate, x: Tensor, y: Tensor) -> AcquisitionFunction:
    """One draw of the function itself.

    :param Surrogate surrogate: trained.
    :param Tensor x: points ``[N, D]``.
    :param Tensor y: values ``[N, 1]``.
    """
    return PosteriorMean(surrogate.draws(1).one())


def log_expected_improvement(
    surrogate: Surrogate, x: Tensor, y: Tensor, *, num_draws: int = NUM_DRAWS
) -> AcquisitionFunction:
    """The logarithm of the expected improvement on the best value, over draws.

    :param Surrogate surrogate: trained.
    :param Tensor x: points ``[N, D]``.
    :param Tensor y: values ``[N, 1]``.
    :param int num_draws: how many draws, S.
    """
    return qLogExpectedImprovement(surrogate.sampled(num_draws), best_f=y.max())


def upper_confidence_bound(
    surrogate: Surrogate, x: Tensor, y: Tensor, *, beta: float = 4.0, num_draws: int = NUM_DRAWS
) -> AcquisitionFunction:
    r"""Mean plus :math:`\sqrt\beta` standard deviations, over draws.

    :param Surrogate surrogate: trained.
    :param Tensor x: points ``[N, D]``.
    :param Tensor y: values ``[N, 1]``.
    :param float beta: the weight.
    :param int num_draws: how many draws, S.
    """
    return qUpperConfidenceBound(surrogate.sampled(num_draws), beta=beta)


def gibbon(surrogate: Surrogate, x: Tensor, y: Tensor, *, num_draws: int = NUM_DRAWS) -> AcquisitionFunction:
    """A lower bound of the information about the maximum, over draws.

    Source: Moss, Leslie, Gonzalez and Rayson (2021), who name it so.

    :param Surrogate surrogate: trained.
    :param Tensor x: points ``[N, D]``.
    :param Tensor y: values ``[N, 1]``.
    :param int num_draws: how many draws, S.
    """
    model: Any = surrogate.sampled(num_draws)
    return qLowerBoundMaxValueEntropy(model, _candidates(x), num_mv_samples=NUM_MAXIMA)


def max_value_entropy(surrogate: Surrogate, x: Tensor, y: Tensor) -> AcquisitionFunction:
    """The information of an evaluation about the maximum, of which there are 10 draws.

    Source: Wang and Jegelka (2017), "Max-value Entropy Search for Efficient Bayesian Optimization", eq. 6; the maxima
    are drawn by its approximation by a Gumbel distribution, on random points.

    :param Surrogate surrogate: trained.
    :param Tensor x: points ``[N, D]``.
    :param Tensor y: values ``[N, 1]``.
    """
    return qMaxValueEntropy(surrogate.normal(), _candidates(x), num_mv_samples=NUM_MAXIMA)


def _candidates(x: Tensor) -> Tensor:
    return torch.rand(NUM_CANDIDATES, x.shape[-1], dtype=x.dtype)
