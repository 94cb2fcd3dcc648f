# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posterior families: for a latent site its parameters, the distribution that they make, and where they start."""

from pyro_radial.infer.autoguide.families.choice import Families, choose_families
from pyro_radial.infer.autoguide.families.delta import Delta
from pyro_radial.infer.autoguide.families.directional import Directional
from pyro_radial.infer.autoguide.families.family import Family, Site
from pyro_radial.infer.autoguide.families.loc_scale import LocScale
from pyro_radial.infer.autoguide.families.normal import Normal
from pyro_radial.infer.autoguide.families.radial import Radial
from pyro_radial.infer.autoguide.families.von_mises_fisher import VonMisesFisher

__all__ = [
    "Delta",
    "Directional",
    "Families",
    "Family",
    "LocScale",
    "Normal",
    "Radial",
    "Site",
    "VonMisesFisher",
    "choose_families",
]
