# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Effect handlers."""

from pyro_radial.poutine.local_noise import local_noise
from pyro_radial.poutine.mean_only import mean_only
from pyro_radial.poutine.one_at_a_time import one_at_a_time
from pyro_radial.poutine.swap_prior import swap_prior
from pyro_radial.poutine.unit_noise import UnitNoise, unit_noise

__all__ = ["UnitNoise", "local_noise", "mean_only", "one_at_a_time", "swap_prior", "unit_noise"]
