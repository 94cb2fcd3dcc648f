# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small programs with fixed seeds. A change that is not meant to change results leaves what they return alone."""
