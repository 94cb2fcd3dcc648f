# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A compiler of Pyro programs: it records a program as a graph of tensor operations, and replays the graph."""
