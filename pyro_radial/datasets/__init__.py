# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small image data sets by name, from a folder or their public source, verified before use."""

from pyro_radial.datasets.images import load

__all__ = ["load"]
