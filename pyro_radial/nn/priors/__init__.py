# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on the parameters of a network, to give to :class:`~pyro_radial.nn.BayesianModule`."""

from pyro_radial.nn.priors.normal import FanIn
from pyro_radial.nn.priors.radial_directional import RadialDirectionalPrior

__all__ = ["FanIn", "RadialDirectionalPrior"]
