# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Effect handlers."""

from pyro_radial.poutine.local_noise import local_noise
from pyro_radial.poutine.mean_only import mean_only
from pyro_radial.poutine.swap_prior import swap_prior

__all__ = ["local_noise", "mean_only", "swap_prior"]
