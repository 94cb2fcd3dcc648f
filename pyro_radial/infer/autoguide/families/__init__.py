# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posterior families. Each defines the parameters of a site, their start, and the distribution that they make."""

from pyro_radial.infer.autoguide.families.directional import Directional, VonMisesFisher
from pyro_radial.infer.autoguide.families.family import Family, LocScale
from pyro_radial.infer.autoguide.families.multivariate_normal import MultivariateNormal
from pyro_radial.infer.autoguide.families.normal import Delta, Normal
from pyro_radial.infer.autoguide.families.radial import Radial

__all__ = [
    "Delta",
    "Directional",
    "Family",
    "LocScale",
    "MultivariateNormal",
    "Normal",
    "Radial",
    "VonMisesFisher",
]
