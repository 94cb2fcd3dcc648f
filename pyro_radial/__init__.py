# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Radial posteriors for Bayesian neural networks in Pyro."""

from pyro_radial._version import __version__

__all__ = ["__version__"]
