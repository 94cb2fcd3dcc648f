# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions of random tensors; importing this package registers the KL rules."""

from pyro_radial.distributions import kl as _kl  # noqa: F401
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.von_mises_fisher import HypersphericalUniform, VonMisesFisherStable

__all__ = ["HypersphericalUniform", "RadialNormal", "VonMisesFisherStable"]
