# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A plain network becomes a Pyro model."""

from pyro_radial.nn import likelihoods, priors
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.multi_head import MultiHead, use_head
from pyro_radial.nn.supervised import SupervisedModel

__all__ = ["BayesianModule", "MultiHead", "SupervisedModel", "likelihoods", "priors", "use_head"]
