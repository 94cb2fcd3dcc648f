# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rewards of which some are known, against the density of those alone."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, RadialELBO, SupervisedModel, predict
from pyro_radial.decisions import History, PulledArm
from pyro_radial.nn import likelihoods

NAN = math.nan


def test_what_is_not_known_does_not_count():
    f = torch.randn(3, 2, requires_grad=True)
    y = torch.tensor([[NAN, 1.0], [2.0, NAN], [0.5, -1.0]])
    scale = torch.tensor(0.7)
    value = PulledArm().observation(f, scale=scale).log_prob(y)
    known = dist.Normal(f, scale).log_prob(y.nan_to_num())
    expected = torch.stack([known[0, 1], known[1, 0], known[2].sum()])
    assert torch.equal(value, expected)
    gradient, of_known = (torch.autograd.grad(v.sum(), f, retain_graph=True)[0] for v in (value, expected))
    assert torch.equal(gradient, of_known)
    assert gradient.isfinite().all()


def test_all_known_is_a_gaussian():
    f, y, scale = torch.randn(4, 5, 2), torch.randn(5, 2), torch.rand(4, 1) + 0.1
    value = PulledArm().observation(f, scale=scale).log_prob(y)
    assert torch.equal(value, likelihoods.Gaussian().observation(f, scale=scale).log_prob(y))


def test_a_loss_is_that_of_the_arms_pulled():
    x = torch.randn(4, 3)
    history = History(x, torch.tensor([0, 1, 1, 0]), torch.randn(4))
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), PulledArm(scale=0.5))
    guide = AutoMeanField(model)
    elbo = RadialELBO()
    elbo(model, guide)(x, history.targets(2))
    torch.manual_seed(1)
    elbo(model, guide)(x, history.targets(2))
    torch.manual_seed(1)
    f = predict(model, guide, x, num_samples=1).samples[0]
    by_hand = -dist.Normal(f.gather(1, history.arms[:, None])[:, 0], 0.5).log_prob(history.rewards).sum()
    assert torch.isfinite(elbo.terms.negative_log_likelihood)
    torch.manual_seed(1)
    draw = guide(x, history.targets(2))
    f = x @ draw["weight"].T + draw["bias"]
    by_hand = -dist.Normal(f.gather(1, history.arms[:, None])[:, 0], 0.5).log_prob(history.rewards).sum()
    assert torch.allclose(elbo.terms.negative_log_likelihood, by_hand)


def test_an_infinite_reward_is_named():
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), PulledArm())
    with pytest.raises(ValueError, match="y must hold finite rewards, or NaN where nothing is known"):
        model(torch.zeros(1, 3), torch.tensor([[math.inf, NAN]]))


def test_an_arm_never_pulled_has_no_rows():
    history = History(torch.arange(6.0).reshape(3, 2), torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]))
    x, y = history.of_arm(2)
    assert (x.tolist(), y.tolist()) == ([[0.0, 1.0], [4.0, 5.0]], [1.0, 3.0])
    assert [len(part) for part in history.of_arm(1)] == [0, 0]
    assert history.targets(3).isnan().tolist() == [[True, True, False], [False, True, True], [True, True, False]]
