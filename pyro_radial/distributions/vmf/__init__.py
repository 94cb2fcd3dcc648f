# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The formulas of the von Mises-Fisher distribution: Bessel functions, sampling and its gradients."""
