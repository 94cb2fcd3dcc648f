# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Losses, training, prediction and guides."""

from pyro_radial.infer.compiled import CompiledELBO, CompiledSVI
from pyro_radial.infer.diagnose.diagnose import diagnose
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.infer.posthoc.laplace import last_layer_laplace
from pyro_radial.infer.prediction.linearized_network import LinearizedNetwork
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.prediction.sampled_network import SampledNetwork
from pyro_radial.infer.reparam import HalfCauchyReparam
from pyro_radial.infer.to_arviz import to_arviz
from pyro_radial.infer.training.fit import fit
from pyro_radial.infer.training.options import FitOptions

__all__ = [
    "CompiledELBO",
    "CompiledSVI",
    "FitOptions",
    "HalfCauchyReparam",
    "LinearizedNetwork",
    "Prediction",
    "SampledNetwork",
    "TermsELBO",
    "diagnose",
    "fit",
    "last_layer_laplace",
    "predict",
    "to_arviz",
]
