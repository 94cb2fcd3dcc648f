# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Effect handlers."""

from pyro_radial.poutine.mean_only import mean_only

__all__ = ["mean_only"]
