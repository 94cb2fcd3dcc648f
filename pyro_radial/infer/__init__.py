# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Losses, training, prediction and guides."""

from pyro_radial.infer.arviz_data import to_arviz
from pyro_radial.infer.compiled_svi import CompiledSVI
from pyro_radial.infer.diagnose import Diagnosis, diagnose
from pyro_radial.infer.dropout import predict_with_dropout
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.ensemble import Ensemble
from pyro_radial.infer.fit import FitResult, fit
from pyro_radial.infer.functional_elbo import FunctionalELBO
from pyro_radial.infer.ivon import fit_ivon
from pyro_radial.infer.laplace import LastLayerLaplace, last_layer_laplace
from pyro_radial.infer.loss_terms import LossTerms
from pyro_radial.infer.posthoc import ScaleSearch, calibrate_scales
from pyro_radial.infer.predict import predict
from pyro_radial.infer.prediction import Prediction
from pyro_radial.infer.reparam import HalfCauchyReparam
from pyro_radial.infer.sampled_network import SampledNetwork
from pyro_radial.infer.scale_curve import ScaleCurve

__all__ = [
    "CompiledSVI",
    "Diagnosis",
    "Ensemble",
    "FitResult",
    "FunctionalELBO",
    "HalfCauchyReparam",
    "LastLayerLaplace",
    "LossTerms",
    "Prediction",
    "RadialELBO",
    "SampledNetwork",
    "ScaleCurve",
    "ScaleSearch",
    "calibrate_scales",
    "diagnose",
    "fit",
    "fit_ivon",
    "last_layer_laplace",
    "predict",
    "predict_with_dropout",
    "to_arviz",
]
