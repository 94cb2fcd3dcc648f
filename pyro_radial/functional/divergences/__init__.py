# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The divergence of the distribution of a network's function values from a prior on functions, at finitely many points.

Each is a :data:`~pyro_radial.functional.divergences.estimate.Divergence`, a function of draws, points and a prior.
"""

from pyro_radial.functional.divergences.estimate import Divergence, DivergenceEstimate
from pyro_radial.functional.divergences.gaussian_kl import GaussianKL
from pyro_radial.functional.divergences.regularized_kl import RegularizedKL
from pyro_radial.functional.divergences.stein_kl import SteinKL

__all__ = ["Divergence", "DivergenceEstimate", "GaussianKL", "RegularizedKL", "SteinKL"]
