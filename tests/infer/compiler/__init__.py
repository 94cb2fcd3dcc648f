# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0
