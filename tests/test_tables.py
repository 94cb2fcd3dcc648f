# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every row of the tables through every generic test, as a user's subclass would run them."""

from pyro_radial.testing import DistributionTests, GuideTests
from tests.tables import DISTRIBUTIONS, GUIDES

for _name, _make in DISTRIBUTIONS.items():
    _class = type(f"Test{_name}", (DistributionTests,), {"make": lambda self, dtype, make=_make: make(dtype)})
    globals()[_class.__name__] = _class

for _name, _make in GUIDES.items():
    _class = type(
        f"Test{_name}", (GuideTests,), {"make": lambda self, model, make=_make, **kwargs: make(model, **kwargs)}
    )
    globals()[_class.__name__] = _class
del _class
