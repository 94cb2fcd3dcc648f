# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Effect handlers."""

from pyro_radial.poutine.local_reparameterization import local_reparameterization
from pyro_radial.poutine.mean_only import mean_only
from pyro_radial.poutine.swap_prior import swap_prior

__all__ = ["local_reparameterization", "mean_only", "swap_prior"]
