# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions: Gaussian processes, piecewise functions, posteriors, samplers and sums."""

from pyro_radial.functional.priors.combined import Sum
from pyro_radial.functional.priors.function_prior import FunctionPrior, ImplicitProcess
from pyro_radial.functional.priors.gaussian_process import GaussianProcess
from pyro_radial.functional.priors.piecewise import PiecewiseConstant, PiecewiseLinear
from pyro_radial.functional.priors.posterior_process import PosteriorProcess

__all__ = [
    "FunctionPrior",
    "GaussianProcess",
    "ImplicitProcess",
    "PiecewiseConstant",
    "PiecewiseLinear",
    "PosteriorProcess",
    "Sum",
]
