# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model's function, linear in its weights: what predictions and losses on functions share."""
