# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.datasets``."""

from pyro_radial.testing import DistributionTests, GuideTests
from tests.calls.sweep import Call, optional, path, some

CALLS = [
    Call(
        "datasets.load",
        lambda: dict(name="digits", data_dir=None),
        lambda found: found.train_images.shape == (1437, 1, 8, 8),
        invalid=dict(name=some(None, "x", 3, ["digits"], "", "MNIST"), data_dir=optional(path) | some(1, b"x")),
    ),
]
NOT_CALLED = {
    f"testing.{tests.__name__}.make": "users define it; the tests give it a dtype or a model"
    for tests in (DistributionTests, GuideTests)
}
