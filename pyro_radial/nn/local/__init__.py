# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What local reparameterization needs beside its handler: noise of units, and of layers with shared weights."""
