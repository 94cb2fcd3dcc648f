# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Automatic guides and where they start."""

from pyro_radial.infer.autoguide import families
from pyro_radial.infer.autoguide.guides import AutoMeanField, AutoRadial, AutoRadialDirectional
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.autoguide.per_site import AutoPerSite

__all__ = [
    "AutoMeanField",
    "AutoPerSite",
    "AutoRadial",
    "AutoRadialDirectional",
    "families",
    "init_to_network",
]
