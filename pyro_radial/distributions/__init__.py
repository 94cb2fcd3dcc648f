# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Laws of random tensors; importing this registers the KL rules."""

from pyro_radial.distributions import kl as _kl  # noqa: F401
from pyro_radial.distributions.radial_normal import RadialNormal

__all__ = ["RadialNormal"]
