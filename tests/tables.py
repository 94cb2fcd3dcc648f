# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The two tables that drive the generic tests: a new family is one row in each."""

import torch

from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.autoguide import AutoMeanField, AutoRadial


def _radial(shape, event_dim):
    def make(dtype):
        loc, scale = torch.randn(shape, dtype=dtype), 0.2 + torch.rand(shape, dtype=dtype)
        return RadialNormal(loc, scale, event_dim)

    return make


DISTRIBUTIONS = {
    "RadialNormalVector": _radial((3, 5), 1),
    "RadialNormalMatrix": _radial((2, 4, 3), 2),
    "RadialNormalPair": _radial((2,), 1),
    "RadialNormalOneElement": _radial((4, 1), 1),
    "RadialNormalNoEvent": _radial((3, 2), 0),
    "RadialNormalPerRow": lambda dtype: _radial((2, 4, 3), 1)(dtype).to_event(1),
}

GUIDES = {
    "AutoRadial": lambda model, **kwargs: AutoRadial(model, init_stddev=0.1, **kwargs),
    "AutoRadialPerRow": lambda model, **kwargs: AutoRadial(model, init_scale=0.2, event_dim=1, **kwargs),
    "AutoMeanField": lambda model, **kwargs: AutoMeanField(model, init_scale=0.1, **kwargs),
}
