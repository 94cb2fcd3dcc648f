# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The version, in the one place that packaging and users read it from."""

__version__ = "0.1.0"
