# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The two tables that drive the generic tests: a new family is one row in each."""

import pyro.distributions as dist
import torch

from pyro_radial.distributions import HypersphericalUniform, RadialDirectional, RadialNormal, VonMisesFisherStable
from pyro_radial.infer.autoguide import AutoMeanField, AutoRadial, AutoRadialDirectional


def _radial(shape, event_dim):
    def make(dtype):
        loc, scale = torch.randn(shape, dtype=dtype), 0.2 + torch.rand(shape, dtype=dtype)
        return RadialNormal(loc, scale, event_dim)

    return make


def _radial_directional(dtype):
    radius = dist.LogNormal(0.3 * torch.randn(2, 1, dtype=dtype), 0.2 + 0.3 * torch.rand(3, dtype=dtype))
    loc = torch.nn.functional.normalize(torch.randn(2, 3, 4, dtype=dtype), dim=-1)
    return RadialDirectional(radius, VonMisesFisherStable(loc, 0.5 + 3 * torch.rand(2, 1, dtype=dtype)))


def _von_mises_fisher(shape, concentration):
    def make(dtype):
        loc = torch.nn.functional.normalize(torch.randn(shape, dtype=dtype), dim=-1)
        return VonMisesFisherStable(loc, torch.tensor(concentration, dtype=dtype))

    return make


DISTRIBUTIONS = {
    "RadialNormalVector": _radial((3, 5), 1),
    "RadialNormalMatrix": _radial((2, 4, 3), 2),
    "RadialNormalPair": _radial((2,), 1),
    "RadialNormalOneElement": _radial((4, 1), 1),
    "RadialNormalNoEvent": _radial((3, 2), 0),
    "RadialNormalPerRow": lambda dtype: _radial((2, 4, 3), 1)(dtype).to_event(1),
    "RadialDirectional": _radial_directional,
    "VonMisesFisherCircle": _von_mises_fisher((2,), [0.0, 1.5, 40.0]),
    "VonMisesFisherSphere": _von_mises_fisher((2, 3), [0.0, 7.0]),
    "VonMisesFisherVector": _von_mises_fisher((3, 1, 12), [0.0, 30.0]),
    "HypersphericalUniform": lambda dtype: HypersphericalUniform(4, (2,), like=torch.zeros((), dtype=dtype)),
}

GUIDES = {
    "AutoRadial": lambda model, **kwargs: AutoRadial(model, init_stddev=0.1, **kwargs),
    "AutoRadialPerRow": lambda model, **kwargs: AutoRadial(model, init_scale=0.2, event_dim=1, **kwargs),
    "AutoRadialDirectional": lambda model, **kwargs: AutoRadialDirectional(model, init_stddev=0.1, **kwargs),
    "AutoRadialDirectionalRadial": lambda model, **kwargs: AutoRadialDirectional(
        model, init_stddev=0.1, rest="radial", **kwargs
    ),
    "AutoMeanField": lambda model, **kwargs: AutoMeanField(model, init_stddev=0.1, **kwargs),
}
