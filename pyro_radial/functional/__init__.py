# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions instead of weights, and the loss, divergences and measurement points to train with."""

from pyro_radial.functional.divergences import (
    GaussianKL,
    LinearizedKL,
    MarginalKL,
    RegularizedKL,
    SteinKL,
)
from pyro_radial.functional.elbo import FunctionalELBO
from pyro_radial.functional.laplace import function_space_laplace
from pyro_radial.functional.measurement_points import BetweenRows, FromData, UniformBox
from pyro_radial.functional.priors import (
    FunctionPrior,
    GaussianProcess,
    ImplicitProcess,
    PiecewiseConstant,
    PiecewiseLinear,
    PosteriorProcess,
    Sum,
)
from pyro_radial.functional.scores import GaussianScore, SteinScore
from pyro_radial.functional.starts import init_to_prior

__all__ = [
    "BetweenRows",
    "FromData",
    "FunctionPrior",
    "FunctionalELBO",
    "GaussianKL",
    "GaussianProcess",
    "GaussianScore",
    "ImplicitProcess",
    "LinearizedKL",
    "MarginalKL",
    "PiecewiseConstant",
    "PiecewiseLinear",
    "PosteriorProcess",
    "RegularizedKL",
    "SteinKL",
    "SteinScore",
    "Sum",
    "UniformBox",
    "function_space_laplace",
    "init_to_prior",
]
