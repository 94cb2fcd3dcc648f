# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Divergences of a network's function values from a prior on functions, at finitely many points.

A divergence is a function of draws, points and a prior that returns a
:class:`~pyro_radial.functional.divergences.estimate.DivergenceEstimate`. A subclass of
:class:`~pyro_radial.functional.divergences.estimate.ProcessDivergence` takes a process with known moments instead of
draws.
"""

from pyro_radial.functional.divergences.gaussian import GaussianKL
from pyro_radial.functional.divergences.process import LinearizedKL
from pyro_radial.functional.divergences.stein import SteinKL

__all__ = ["GaussianKL", "LinearizedKL", "SteinKL"]
