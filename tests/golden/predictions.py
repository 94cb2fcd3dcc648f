# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions from a guide, from given draws, and as one network."""

import pyro.distributions as dist
import torch

from pyro_radial import AutoMeanField, AutoRadial, predict
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods
from tests.golden.losses import LOCAL
from tests.golden.programs import classification, classifier, program, regression, regressor, trained


def classifier_and_guide(**options):
    model = classifier(**options)
    guide = AutoRadial(model, init_stddev=0.2)
    guide.setup(*classification())
    return model, guide


def summary(prediction, y):
    return {"samples": prediction.samples, "mean": prediction.mean, "log_prob": prediction.log_prob(y)}


@program
def predictions():
    x, y = classification()
    model, guide = classifier_and_guide()
    torch.manual_seed(1)
    prediction = predict(model, guide, x, num_samples=16)
    torch.manual_seed(2)
    many = predict(model, guide, x[:5], num_samples=300, chunk_size=64)
    torch.manual_seed(3)
    local_model, local_guide = classifier_and_guide(**LOCAL)
    local = predict(local_model, local_guide, x, num_samples=8)
    return {
        "few": summary(prediction, y),
        "entropy": prediction.entropy,
        "mutual information": prediction.mutual_information,
        "many": summary(many, y[:5]),
        "local": summary(local, y),
    }


@program
def predictions_of_real_values():
    x, y = regression()
    results = {}
    for name, likelihood in {
        "fixed": likelihoods.Gaussian(num_data=16, scale=0.2),
        "precision": likelihoods.Gaussian(num_data=16, precision_prior=dist.Gamma(4.0, 1.0)),
    }.items():
        model = regressor()
        model.likelihood = likelihood
        guide = AutoMeanField(model, init_stddev=0.1)
        guide.setup(x, y)
        torch.manual_seed(1)
        prediction = predict(model, guide, x, num_samples=16)
        results[name] = {
            **summary(prediction, y),
            "epistemic": prediction.epistemic_variance,
            "aleatoric": prediction.aleatoric_variance,
            "quantiles": prediction.quantiles([0.1, 0.9]),
            "targets": prediction.sample_targets(2),
        }
    return results


@program
def predictions_from_draws():
    x, y = classification()
    model, guide = classifier_and_guide()
    torch.manual_seed(1)
    draws = [guide(x, y) for _ in range(6)]
    samples = {name: torch.stack([draw[name] for draw in draws]).detach() for name in draws[0]}
    return summary(predict(model, samples, x), y)


@program
def sampled_network():
    x, y = classification()
    model, guide = classifier_and_guide()
    trained(model, guide, (x, y))
    torch.manual_seed(2)
    net = SampledNetwork(model, guide, num_samples=5, x=x[:2])
    return {"outputs": net(x), "prediction": summary(net.predict(x), y), "again": net(x[:3])}
