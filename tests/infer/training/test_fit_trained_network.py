# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training that goes on from a plain network, with a prior at its weights."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty.metrics import accuracy

X = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, :1] * X[:, 1:2] > 0).long().squeeze(-1) + 2 * (X[:, 2] > 0).long()


def network():
    return nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 4))


def trained():
    """A plain network that knows most of the rows."""
    torch.manual_seed(1)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
    return net


def accuracy_after_an_epoch(net, prior, guide_type):
    """Before and after; there are few steps to do harm or good."""
    pyro.set_rng_seed(2)
    model = SupervisedModel(BayesianModule(net, prior), likelihoods.Categorical())
    guide = guide_type(model)
    optim = partial(torch.optim.Adam, lr=0.01)
    fit(model, guide, (X, Y), epochs=1, batch_size=20, optim=optim, seed=0, progress=False)
    return float(accuracy(net(X).softmax(-1), Y)), float(accuracy(predict(model, guide, X, 32).mean, Y))


def test_a_prior_can_have_its_center_at_the_weights_of_each_site():
    net = trained()
    bnn = BayesianModule(net, lambda name, parameter: dist.Normal(parameter, 0.1 if "weight" in name else 0.2))
    by_name = {name: dist.Normal(p.detach(), 0.1) for name, p in net.named_parameters()}
    for module, widths in ((bnn, {"weight": 0.1, "bias": 0.2}), (BayesianModule(net, by_name), {"": 0.1})):
        sites = poutine.trace(module).get_trace(X).nodes
        for name, parameter in net.named_parameters():
            prior = sites[name]["fn"]
            (width,) = (width for part, width in widths.items() if part in name)
            assert torch.equal(prior.mean, parameter)
            assert torch.allclose(prior.variance, torch.full_like(parameter, width**2))
    before = bnn.to_module(AutoRadial(bnn).median(X))
    assert torch.equal(before(X), net(X))
    # The prior is a copy: further training of the plain network does not move it.
    center = poutine.trace(bnn).get_trace(X).nodes["0.weight"]["fn"].mean.clone()
    with torch.no_grad():
        net[0].weight.add_(1.0)
    assert torch.equal(poutine.trace(bnn).get_trace(X).nodes["0.weight"]["fn"].mean, center)


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_an_epoch_keeps_the_accuracy_of_a_trained_network(guide_type):
    before, after = accuracy_after_an_epoch(trained(), lambda name, p: dist.Normal(p, 0.1), guide_type)
    assert before > 0.95
    assert after > before - 0.02
    # One epoch from a new network does not get there.
    _, new = accuracy_after_an_epoch(network(), dist.Normal(0.0, 0.1), guide_type)
    assert new < before - 0.1
