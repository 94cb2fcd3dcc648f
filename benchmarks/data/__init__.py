# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Data that only the benchmarks need: tables, and augmentation of images."""
