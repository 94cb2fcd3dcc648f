# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The numerics of the von Mises-Fisher distribution: Bessel functions, scalar functions and sampling."""
