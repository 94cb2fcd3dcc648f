# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The parts of local reparameterization besides its handler: the noise of units, and layers that compute with it."""
