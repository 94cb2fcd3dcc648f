# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Test cases that this library runs on its own classes; inherit them for a class of yours.

They need pytest, which ``pip install 'pyro-radial[testing]'`` installs.

Example, in a test file that pytest collects::

    class TestMyDistribution(DistributionTests):
        def make(self, dtype=torch.float64):
            return MyDistribution(torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype))

    class TestMyGuide(GuideTests):
        def make(self, model, **kwargs):
            return MyGuide(model, **kwargs)
"""

try:
    import pytest  # noqa: F401
except ImportError as error:
    raise ImportError(
        "pyro_radial.testing needs pytest: pip install 'pyro-radial[testing]'"
    ) from error

from pyro_radial.testing.distributions import DistributionTests
from pyro_radial.testing.guides import GuideTests

__all__ = ["DistributionTests", "GuideTests"]
