# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from benchmarks._published_rule import PublishedRule
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, fit
from pyro_radial.nn import likelihoods


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("beta1", "prior"), [(0.0, 0.5), (0.9, 1e4)])
def test_a_normal_posterior_takes_the_steps_of_ivon(double, monkeypatch, beta1, prior):
    """The authors leave the prior out of the average of gradients: with no average or a flat prior there is no gap."""
    ivon = pytest.importorskip("ivon", reason="needs ivon-opt")
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    net = nn.Linear(4, 3, bias=False)
    model = SupervisedModel(BayesianModule(net, dist.Normal(0.0, prior)), likelihoods.Categorical(num_data=30))
    guide = AutoMeanField(model)
    guide.setup(x, y)
    decay = 1 / (30 * prior**2)
    settings = {"lr": 0.1, "hess_init": 0.7, "beta1": beta1, "beta2": 0.9999}
    optimizer = PublishedRule(guide.parameters(), guide, 30, **settings)
    theirs = ivon.IVON([net.weight], ess=30, rescale_lr=False, weight_decay=decay, **settings)
    elbo = TermsELBO()(model, guide)
    for _ in range(20):
        optimizer.zero_grad()
        before, state = guide.posterior()["weight"].base_dist, torch.get_rng_state()
        drawn = guide(x, y)["weight"].detach()
        torch.set_rng_state(state)
        elbo(x, y).backward()
        noise = ((drawn - before.loc) / before.scale).flatten()
        monkeypatch.setattr(torch, "randn", lambda *args, noise=noise, **kwargs: noise)
        with theirs.sampled_params(train=True):
            theirs.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
        monkeypatch.undo()
        optimizer.step()
        theirs.step()
        now = guide.posterior()["weight"].base_dist
        assert not torch.equal(before.loc, now.loc)
        torch.testing.assert_close(now.loc, net.weight, rtol=0.0, atol=1e-7)
        hessian = theirs.param_groups[0]["hess"].reshape(3, 4)
        torch.testing.assert_close(now.scale, (30 * (hessian + decay)).rsqrt(), rtol=1e-7, atol=0.0)


def problem():
    torch.manual_seed(1)
    x = torch.randn(20, 3)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    model = SupervisedModel(BayesianModule(net, dist.Normal(0.0, 1.0)), likelihoods.Categorical(num_data=20))
    return model, AutoRadial(model), (x, (x.sum(-1) > 0).long())


def test_widths_start_at_the_curvature_of_the_data_and_the_precision_of_the_prior():
    _, guide, data = problem()
    guide.setup(*data)
    PublishedRule(guide.parameters(), guide, 20, 0.1, hess_init=0.3)
    for posterior in guide.posterior().values():
        expected = torch.tensor((20 * 0.3 + 1.0) ** -0.5)
        torch.testing.assert_close(posterior.stddev, expected.expand_as(posterior.stddev))


def test_a_resumed_run_ends_where_another_does(tmp_path):
    ends = []
    for checkpoint, epochs in ((None, (6,)), (tmp_path / "run", (3, 6))):
        for number in epochs:
            model, guide, data = problem()
            settings = {"epochs": number, "batch_size": 8, "checkpoint": checkpoint, "progress": False, "seed": 0}
            settings["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)
            settings["optim"] = lambda p, guide=guide: PublishedRule(p, guide, 20, 0.2, hess_init=0.3, beta2=0.99)
            history = fit(model, guide, data, **settings).history
        ends.append({**guide.state_dict(), **model.state_dict()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name])
    assert history[-1]["loss"] < history[0]["loss"]
