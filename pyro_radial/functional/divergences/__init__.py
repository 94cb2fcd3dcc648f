# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The divergence of the distribution of a network's function values from a prior on functions, at finitely many points.

Each is a function of draws, points and a prior, or a
:class:`~pyro_radial.functional.divergences.estimate.ProcessDivergence` of a process in the place of draws.
"""

from pyro_radial.functional.divergences.estimate import Divergence, DivergenceEstimate, ProcessDivergence
from pyro_radial.functional.divergences.gaussian_kl import GaussianKL
from pyro_radial.functional.divergences.linearized_kl import LinearizedKL
from pyro_radial.functional.divergences.marginal_kl import MarginalKL
from pyro_radial.functional.divergences.regularized_kl import RegularizedKL
from pyro_radial.functional.divergences.stein_kl import SteinKL

__all__ = [
    "Divergence",
    "DivergenceEstimate",
    "GaussianKL",
    "LinearizedKL",
    "MarginalKL",
    "ProcessDivergence",
    "RegularizedKL",
    "SteinKL",
]
