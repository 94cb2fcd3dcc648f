# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors with several scales: a mixture, and priors that make sites themselves, of learned and of random scales."""

from operator import attrgetter

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam

from pyro_radial._pyro.compat import deep_setattr


def scale_mixture(pi=0.5, scale1=1.0, scale2=0.0025):
    """A wide and a narrow normal around zero, for each element (Blundell et al. 2015, eq. 7)."""
    normals = dist.Normal(torch.zeros(2), torch.tensor([scale1, scale2]))
    return dist.MixtureSameFamily(dist.Categorical(torch.tensor([pi, 1.0 - pi])), normals)


class LearnedScale(PyroModule):
    """A normal prior with a learned standard deviation for each parameter tensor: empirical Bayes."""

    def __init__(self, init_scale=1.0):
        super().__init__()
        self.init_scale = init_scale
        self.scales = PyroModule()

    def setup(self, named_parameters):
        for name, parameter in named_parameters:
            scale = parameter.new_full((), self.init_scale)
            deep_setattr(self.scales, name, PyroParam(scale, constraints.softplus_positive))

    def scale(self, name):
        return attrgetter(name)(self.scales)

    def sample_parameter(self, name, parameter):
        return sample_normal(name, parameter, self.scale(name))


class HyperScale:
    """A normal prior with a random standard deviation for each parameter tensor, the site ``name_prior_scale``."""

    def __init__(self, prior_scale=1.0):
        self.prior_scale = prior_scale

    def sample_parameter(self, name, parameter):
        scale_prior = dist.HalfNormal(parameter.new_tensor(self.prior_scale))
        return sample_normal(name, parameter, pyro.sample(f"{name}_prior_scale", scale_prior))


def sample_normal(name, parameter, scale):
    """Sample N(0, scale^2) for every element; ``scale`` has the shape of the draws."""
    scale = scale.reshape(scale.shape + (1,) * parameter.dim())
    normal = dist.Normal(torch.zeros_like(parameter), scale).to_event(parameter.dim())
    return pyro.sample(name, normal, infer={"initial_value": parameter})
