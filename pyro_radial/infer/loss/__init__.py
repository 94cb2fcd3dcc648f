# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss of a program: its terms, the KL of each site, the ELBO, and what in it is not finite."""
