# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Names of ``pyro_radial.testing``."""

#: Users define these.
NOT_CALLED = {"testing.DistributionTests.make", "testing.GuideTests.make"}
