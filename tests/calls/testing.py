# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Names of ``pyro_radial.testing``."""

from pyro_radial.testing import DistributionTests, GuideTests

NOT_CALLED = {
    f"testing.{tests.__name__}.make": "users define it; the tests give it a dtype or a model"
    for tests in (DistributionTests, GuideTests)
}
