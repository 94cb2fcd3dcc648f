# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scales that are chosen after training, and a Laplace approximation of the last layer."""

import torch

from pyro_radial import AutoMeanField, AutoRadial, predict
from pyro_radial.infer import calibrate_scales, last_layer_laplace
from pyro_radial.infer.autoguide.families import Delta
from tests.golden.programs import classification, classifier, program, trained, values


@program
def calibrated_scales():
    results = {}
    choices = {"one number": (), "a function": (lambda name, mean: 0.1 + mean.abs(),)}
    for name, scales in choices.items():
        for guide_type in (AutoRadial, AutoMeanField):
            torch.manual_seed(1)
            model = classifier()
            guide = guide_type(model, init_stddev=0.05)
            trained(model, guide, classification())
            validation = classification(10, seed=8)
            search = calibrate_scales(model, guide, validation, *scales, num_samples=4, seed=2, progress=False)
            results[f"{name} {guide_type.__name__}"] = {
                "nll": search.nll,
                "plain": search.plain_nll,
                "parameters": values(guide),
            }
    return results


@program
def laplace_of_the_last_layer():
    results = {}
    for structure in ("full", "kronecker"):
        torch.manual_seed(1)
        model = classifier()
        guide = AutoRadial(model, families={".*": Delta()})
        data = classification()
        trained(model, guide, data)
        posterior = last_layer_laplace(model, guide, data, structure=structure)
        torch.manual_seed(3)
        results[structure] = {
            "precision": posterior.prior_precision,
            "evidence": posterior.log_evidence,
            "covariance": posterior.covariance(),
            "mean": predict(model, posterior, data[0][:5], num_samples=8).mean,
        }
    return results
