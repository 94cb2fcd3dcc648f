# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Formulas for the KLs in the table of rules: to a normal distribution, and to a radial one."""
