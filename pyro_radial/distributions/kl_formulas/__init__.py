# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Closed and nearly closed forms of the Kullback-Leibler divergences that the table of rules names."""
