# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Radial posteriors for Bayesian neural networks in Pyro."""

from pyro_radial._version import __version__
from pyro_radial.continual import PriorChain
from pyro_radial.functional import FunctionalELBO
from pyro_radial.infer import (
    CompiledSVI,
    FitOptions,
    Prediction,
    TermsELBO,
    diagnose,
    fit,
    predict,
)
from pyro_radial.infer.autoguide import AutoMeanField, AutoRadial, AutoRadialDirectional
from pyro_radial.nn import BayesianModule, SupervisedModel

__all__ = [
    "AutoMeanField",
    "AutoRadial",
    "AutoRadialDirectional",
    "BayesianModule",
    "CompiledSVI",
    "FitOptions",
    "FunctionalELBO",
    "Prediction",
    "PriorChain",
    "SupervisedModel",
    "TermsELBO",
    "__version__",
    "diagnose",
    "fit",
    "predict",
]
