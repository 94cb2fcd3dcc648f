# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions: a Gaussian process, pieces, networks, a posterior, any sampler, and what they make together."""

from pyro_radial.functional.priors.bnn_prior import BNNPrior
from pyro_radial.functional.priors.combined import Mixture, Sum
from pyro_radial.functional.priors.function_prior import FunctionPrior
from pyro_radial.functional.priors.gaussian_process import GaussianProcess
from pyro_radial.functional.priors.implicit_process import ImplicitProcess
from pyro_radial.functional.priors.piecewise import PiecewiseConstant, PiecewiseLinear
from pyro_radial.functional.priors.posterior_process import PosteriorProcess

__all__ = [
    "BNNPrior",
    "FunctionPrior",
    "GaussianProcess",
    "ImplicitProcess",
    "Mixture",
    "PiecewiseConstant",
    "PiecewiseLinear",
    "PosteriorProcess",
    "Sum",
]
