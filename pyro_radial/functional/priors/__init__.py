# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions: a Gaussian process, random pieces, networks, any sampler, and what they make together."""

from pyro_radial.functional.priors.bnn_prior import BNNPrior
from pyro_radial.functional.priors.combined import Mixture, Sum
from pyro_radial.functional.priors.function_prior import FunctionPrior
from pyro_radial.functional.priors.gaussian_process import GaussianProcess
from pyro_radial.functional.priors.implicit_process import ImplicitProcess
from pyro_radial.functional.priors.piecewise import PiecewiseConstant, PiecewiseLinear

__all__ = [
    "BNNPrior",
    "FunctionPrior",
    "GaussianProcess",
    "ImplicitProcess",
    "Mixture",
    "PiecewiseConstant",
    "PiecewiseLinear",
    "Sum",
]
