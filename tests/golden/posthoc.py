# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Laplace approximation of the last layer."""

import torch

from pyro_radial import AutoRadial, predict
from pyro_radial.infer import last_layer_laplace
from pyro_radial.infer.autoguide.families import Delta
from tests.golden.programs import classification, classifier, program, trained


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
