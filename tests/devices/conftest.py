# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Leaves the suite to a process of its own; an import of it would give this process the device."""

collect_ignore = ["suite.py"]
