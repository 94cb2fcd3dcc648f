# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Programs of packages that use Pyro, and the process that runs one of them."""
