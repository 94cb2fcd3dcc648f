# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the rest leans on: Pyro's undocumented names, names of parameters, random numbers, checks of arguments."""
