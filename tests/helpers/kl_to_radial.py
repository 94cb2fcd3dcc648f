# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL of a radial or normal distribution to a radial one, as a function of four tensors."""

import pyro.distributions as dist
import torch
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal

FAMILIES = ["radial", "normal"]


def parameters(*shape, dtype=torch.double):
    """A location and a scale of each of the two distributions."""
    return [make(*shape, dtype=dtype) + low for make, low in ((torch.randn, 0.0), (torch.rand, 0.3)) * 2]


def kl_of(family):
    """The KL from a distribution of a family to a radial one."""

    def kl(loc, scale, center, unit):
        q = RadialNormal(loc, scale, validate_args=False)
        if family == "normal":
            q = dist.Normal(loc, scale, validate_args=False).to_event(1)
        return kl_divergence(q, RadialNormal(center, unit, validate_args=False))

    return kl
