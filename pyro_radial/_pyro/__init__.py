# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Undocumented names of Pyro and torch, types, names of parameters, random numbers and checks of arguments."""
