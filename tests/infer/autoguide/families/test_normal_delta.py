# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A point for every site is the plain network: ridge regression in closed form, and no noise anywhere."""

from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim import SGD

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO, fit, predict
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods

NOISE, PRIOR = 0.5, 0.3
X = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.tensor([[1.0], [-2.0], [0.5]]).double()) + NOISE * torch.randn(20, 1).double()


def plain(net, prior=PRIOR, likelihood=None):
    model = SupervisedModel(
        BayesianModule(net, prior=dist.Normal(0.0, prior)), likelihood or likelihoods.Gaussian(scale=NOISE)
    )
    return model, AutoRadial(model, families={".": families.Delta()})


@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_it_is_ridge_regression_with_the_weight_decay_of_the_prior(kl_weight):
    model, guide = plain(nn.Linear(3, 1, bias=False).double())
    loss = TermsELBO(kl_weight=kl_weight)
    # The squared error per datum over 2 NOISE^2 has curvatures of about 4 and the prior 1 / (0.09 * 20): 0.1 converges.
    fit(model, guide, (X, Y), epochs=300, optim=partial(SGD, lr=0.1 / 20), loss=loss, seed=0, progress=False)
    decay = kl_weight * NOISE**2 / PRIOR**2
    expected = torch.linalg.solve(X.mT @ X + decay * torch.eye(3).double(), X.mT @ Y)
    torch.testing.assert_close(guide.median()["weight"], expected.mT)
    prediction = predict(model, guide, X, 2)
    torch.testing.assert_close(prediction.mean, X @ expected)
    assert torch.equal(*prediction.samples)
    torch.testing.assert_close(prediction.variance, torch.full_like(Y, NOISE**2))


def test_steps_are_those_of_the_network_trained_by_torch_with_weight_decay():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    y = torch.arange(20) % 4
    model, guide = plain(net, likelihood=likelihoods.Categorical())
    fit(model, guide, (X, y), epochs=5, optim=partial(SGD, lr=0.1 / 20), seed=0, progress=False)
    optimizer = SGD(net.parameters(), lr=0.1, weight_decay=1 / (PRIOR**2 * 20))
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), y).backward()
        optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(guide.median()[name], value)
    torch.testing.assert_close(predict(model, guide, X, 1).samples[0], net(X).detach())
