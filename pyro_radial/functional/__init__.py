# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions instead of weights, and the loss, divergences and measurement points to train with."""

from pyro_radial.functional.divergences import GaussianKL, LinearizedKL, SteinKL
from pyro_radial.functional.elbo import FunctionalELBO
from pyro_radial.functional.laplace import function_space_laplace, init_to_prior
from pyro_radial.functional.measurement_points import BetweenRows, UniformBox
from pyro_radial.functional.priors import (
    FunctionPrior,
    GaussianProcess,
    ImplicitProcess,
    PosteriorProcess,
)

__all__ = [
    "BetweenRows",
    "FunctionPrior",
    "FunctionalELBO",
    "GaussianKL",
    "GaussianProcess",
    "ImplicitProcess",
    "LinearizedKL",
    "PosteriorProcess",
    "SteinKL",
    "UniformBox",
    "function_space_laplace",
    "init_to_prior",
]
