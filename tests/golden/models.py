# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks as Pyro models: likelihoods and priors on weights."""

import math

import pyro.distributions as dist
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.nn import MultiHead, likelihoods, use_head
from pyro_radial.nn.priors import FanIn
from tests.golden.programs import classification, classifier, loss_and_gradients, network, program
from tests.helpers.scale_priors import HyperScale, LearnedScale, scale_mixture


@program
def each_likelihood():
    x, y = classification()
    real = torch.stack([x.sum(-1), x[:, 0]], -1)
    cases = {
        "bernoulli": (likelihoods.Bernoulli(num_data=50), torch.stack([y, 1 - y], -1).to(x.dtype)),
        "categorical": (likelihoods.Categorical(num_data=50), y),
        "gaussian": (likelihoods.Gaussian(num_data=50, scale=0.5), real),
        "learned scale": (likelihoods.Gaussian(num_data=50, scale=0.5, learn_scale=True), real),
        "precision": (likelihoods.Gaussian(num_data=50, precision_prior=dist.Gamma(2.0, 1.0)), real),
        "heteroscedastic": (likelihoods.HeteroscedasticGaussian(num_data=50), real[:, :1]),
        "poisson": (likelihoods.Poisson(num_data=50), torch.stack([y, 2 * y], -1).to(x.dtype)),
    }
    results = {}
    for name, (likelihood, target) in cases.items():
        model = SupervisedModel(BayesianModule(network(), dist.Normal(0.0, 1.0)), likelihood)
        results[name] = loss_and_gradients(TermsELBO(), model, AutoMeanField(model, init_stddev=0.1), x, target)
    return results


@program
def each_prior_on_weights():
    priors = {
        "normal": dist.Normal(0.0, 0.5),
        "fan in": FanIn(gain=1.5, bias_scale=0.5),
        "hyper scale": HyperScale(),
        "learned scale": LearnedScale(init_scale=0.7),
        "mixture": scale_mixture(pi=0.4, scale2=math.exp(-6)),
    }
    results = {}
    for name, prior in priors.items():
        model = classifier(prior=prior)
        guide = AutoMeanField(model, init_stddev=0.1)
        results[name] = loss_and_gradients(TermsELBO(), model, guide, *classification())
    return results


@program
def some_weights_random_and_heads():
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh())
    net = MultiHead(trunk, [nn.Linear(4, 2) for _ in range(2)])
    bnn = BayesianModule(net, dist.Normal(0.0, 1.0), select=lambda name, parameter: "heads" in name)
    model = SupervisedModel(bnn, likelihoods.Categorical(num_data=24))
    results = {}
    for head in (0, 1):
        use_head(model, head)
        guide = AutoRadial(model, init_stddev=0.1)
        results[str(head)] = loss_and_gradients(TermsELBO(), model, guide, *classification())
    results["buffers"] = {name: value for name, value in model.named_buffers() if value.is_floating_point()}
    return results
