# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions: Gaussian processes, posteriors and samplers."""

from pyro_radial.functional.priors.function_prior import FunctionPrior, ImplicitProcess
from pyro_radial.functional.priors.gaussian_process import GaussianProcess
from pyro_radial.functional.priors.posterior_process import PosteriorProcess

__all__ = [
    "FunctionPrior",
    "GaussianProcess",
    "ImplicitProcess",
    "PosteriorProcess",
]
