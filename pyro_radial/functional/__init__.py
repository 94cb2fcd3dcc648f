# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions instead of weights, how far functions are from them, and where to compare."""

from pyro_radial.functional.adversarial import AdversarialPoints
from pyro_radial.functional.divergences import (
    DivergenceEstimate,
    GaussianKL,
    LinearizedKL,
    MarginalKL,
    RegularizedKL,
    SteinKL,
)
from pyro_radial.functional.measurement_points import BetweenRows, Concatenated, FromData, FromSampler, UniformBox
from pyro_radial.functional.priors import (
    BNNPrior,
    FunctionPrior,
    GaussianProcess,
    ImplicitProcess,
    Mixture,
    PiecewiseConstant,
    PiecewiseLinear,
    PosteriorProcess,
    Sum,
)
from pyro_radial.functional.scores import GaussianScore, SpectralSteinScore, SteinScore

__all__ = [
    "AdversarialPoints",
    "BNNPrior",
    "BetweenRows",
    "Concatenated",
    "DivergenceEstimate",
    "FromData",
    "FromSampler",
    "FunctionPrior",
    "GaussianKL",
    "GaussianProcess",
    "GaussianScore",
    "ImplicitProcess",
    "LinearizedKL",
    "MarginalKL",
    "Mixture",
    "PiecewiseConstant",
    "PiecewiseLinear",
    "PosteriorProcess",
    "RegularizedKL",
    "SpectralSteinScore",
    "SteinKL",
    "SteinScore",
    "Sum",
    "UniformBox",
]
