# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import local_reparameterization
from tests.helpers.networks import Net

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def twice():
    layers = {"first": nn.Linear(4, 3), "shared": nn.Linear(3, 3)}
    return Net(lambda net, x: net.shared(net.shared(net.first(x))), **layers)


def elsewhere():
    """An autoencoder whose decoder is its encoder's transpose."""

    def call(net, x):
        return net.head(nn.functional.linear(net.encoder(x), net.encoder.weight.T))

    return Net(call, encoder=nn.Linear(4, 3), head=nn.Linear(4, 2))


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].weight = net[0].weight
    return net


def flat():
    """It computes two positions of a row as two rows."""
    layers = {"first": nn.Linear(2, 3), "head": nn.Linear(6, 2)}
    return Net(lambda net, x: net.head(net.first(x.reshape(-1, 2)).reshape(len(x), -1)), **layers)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def tokens():
    layers = {"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 2)}
    return Net(lambda net, x: net.head(net.embedding((x > 0).long()).sum(1)), **layers)


def attention():
    def call(net, x):
        x = x.reshape(len(x), 2, 2)
        return net.head(net.attention(x, x, x, need_weights=False)[0].flatten(1))

    return Net(call, attention=nn.MultiheadAttention(2, 1, batch_first=True), head=nn.Linear(4, 2))


def recurrent():
    layers = {"cells": nn.LSTM(2, 3, batch_first=True), "head": nn.Linear(3, 2)}
    return Net(lambda net, x: net.head(net.cells(x.reshape(len(x), 2, 2))[0][:, -1]), **layers)


# By network: the parameters that are drawn, and a word of the reason.
DRAWN = {
    "a layer called twice": (twice, "shared.weight shared.bias", "called more than once"),
    "a weight used elsewhere": (elsewhere, "encoder.weight encoder.bias", "outside of its layer"),
    "a tied weight": (tied, "0.weight", "the same as 1.weight"),
    "positions as rows": (flat, "first.weight first.bias", "no row for each of 6 rows"),
    "a subclass": (lambda: nn.Sequential(Scaled(4, 3), nn.Linear(3, 2)), "0.weight 0.bias", "Scaled has no local"),
    "an embedding": (tokens, "embedding.weight", "Embedding has no local"),
    "attention": (
        attention,
        "attention.in_proj_weight attention.in_proj_bias attention.out_proj.weight attention.out_proj.bias",
        "MultiheadAttention has no local",
    ),
    "a recurrent layer": (
        recurrent,
        "cells.weight_ih_l0 cells.weight_hh_l0 cells.bias_ih_l0 cells.bias_hh_l0",
        "LSTM has no local",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        "0.weight 0.bias 2.weight 2.bias",
        "batch norm '1' in train mode mixes rows",
    ),
    "one row for all": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(0), nn.Unflatten(0, (2, 6))),
        "0.weight 0.bias",
        "no row for each row",
    ),
}
each_network = pytest.mark.parametrize(("make", "drawn", "why"), DRAWN.values(), ids=DRAWN)


def guided(net, guide_type=AutoMeanField, stddev=0.3):
    bnn = BayesianModule(net)
    guide = guide_type(bnn, init_stddev=stddev)
    guide.setup(X)
    return bnn, guide


def outputs(bnn, guide, x=X):
    """A call of the network with what a guide leaves undrawn."""
    trace = pyro.poutine.trace(local_reparameterization(guide)).get_trace(x)
    return pyro.poutine.replay(bnn, trace=trace)(x)


@each_network
def test_what_cannot_be_local_is_drawn_and_named_once(make, drawn, why):
    bnn, guide = guided(make())
    with pytest.warns(UserWarning, match=why) as caught:
        f = outputs(bnn, guide)
    (message,) = (str(warning.message) for warning in caught)
    assert [name for name in bnn.sites if f"{name}:" in message] == drawn.split()
    assert torch.isfinite(f).all()


@each_network
@pytest.mark.filterwarnings("ignore")
def test_all_particles_have_noise_of_their_own(make, drawn, why):
    bnn, guide = guided(make())
    model = SupervisedModel(bnn, likelihoods.Gaussian())
    elbo = TermsELBO(3, vectorize_particles=True, max_plate_nesting=1)
    local = local_reparameterization(guide)
    y = torch.zeros(bnn(X).shape)
    elbo(model, local)(X, y).backward()
    trace = pyro.poutine.trace(elbo._vectorized_num_particles(local)).get_trace(X)
    f = pyro.poutine.replay(elbo._vectorized_num_particles(bnn), trace=trace)(X)
    assert f.shape == (3, *y.shape)
    assert not torch.allclose(f[0], f[1])
    assert all(torch.isfinite(p.grad).all() for p in guide.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["a layer called twice", "positions as rows", "a recurrent layer", "batch norm"])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_the_spread_is_that_of_drawn_weights(name):
    bnn, guide = guided(DRAWN[name][0](), stddev=0.05)
    local = torch.stack([outputs(bnn, guide) for _ in range(100)])
    whole = torch.stack([pyro.poutine.condition(bnn, data=guide(X))(X) for _ in range(100)])
    error = (local.var(0) / 100 + whole.var(0) / 100).sqrt()
    assert bool(((local.mean(0) - whole.mean(0)).abs() < 4.5 * error).all())
    # Of a variance that 100 nearly normal numbers estimate, and of several at once.
    ratios = (local.var(0) / whole.var(0)).log()
    assert float(ratios.abs().max()) < 5 * (4 / 100) ** 0.5


def test_other_layers_have_noise_for_each_row():
    # Equal rows differ in the noise of their own that the second layer gives them.
    x = X[:1].expand(6, 4)
    bnn, guide = guided(nn.Sequential(Scaled(4, 3), nn.Linear(3, 2)))
    with pytest.warns(UserWarning, match="drawn"):
        f = outputs(bnn, guide, x)
    assert len(f.unique(dim=0)) == 6
    bnn, guide = guided(Scaled(4, 2))
    with pytest.warns(UserWarning, match="drawn"):
        f = outputs(bnn, guide, x)
    torch.testing.assert_close(f, f[:1].expand_as(f))


def test_a_call_that_starts_again_leaves_running_statistics_as_one_call_does():
    def call(net, x):
        net.calls += 1
        return net.layer(net.layer(x))

    net = Net(call, layer=nn.Linear(4, 4))
    net.register_buffer("calls", torch.zeros(()))
    bnn, guide = guided(net)
    before = float(bnn.net.calls)
    with pytest.warns(UserWarning, match="called more than once"):
        outputs(bnn, guide)
    assert float(bnn.net.calls) == before + 1


def test_a_network_that_recomputes_parts_gets_the_same_noise_again():
    def call(net, x):
        return net.second(torch.tanh(net.first(x)))

    def call_checkpointed(net, x):
        return checkpoint(lambda a: net.second(torch.tanh(a)), net.first(x), use_reentrant=False)

    gradients = []
    for each_call in (call_checkpointed, call):
        torch.manual_seed(0)
        bnn, guide = guided(Net(each_call, first=nn.Linear(4, 3), second=nn.Linear(3, 2)))
        # The first call finds out how to run the network.
        outputs(bnn, guide)
        assert len(outputs(bnn, guide, X[:1].expand(6, 4)).unique(dim=0)) == 6
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        f = outputs(bnn, guide, x)
        f.square().sum().backward()
        gradients.append([f.detach(), *(p.grad for p in guide.parameters())])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("as_buffer", [True, False])
@pytest.mark.parametrize("name", ["bias", "weight"])
@pytest.mark.filterwarnings("ignore:local reparameterization. these parameters are drawn")
def test_a_tensor_that_is_no_parameter_counts(as_buffer, name):
    net = nn.Linear(4, 2)
    value = torch.full_like(getattr(net, name).detach(), 100.0)
    delattr(net, name)
    if as_buffer:
        net.register_buffer(name, value)
    else:
        setattr(net, name, value)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(), local_reparameterization=True)
    guide = AutoMeanField(model)
    y = net(X).detach()
    trace = pyro.poutine.trace(guide).get_trace(X, y)
    f = pyro.poutine.trace(pyro.poutine.replay(model, trace=trace)).get_trace(X, y).nodes["f"]["value"]
    torch.testing.assert_close(f, y, atol=5.0, rtol=0.0)


@pytest.mark.filterwarnings("ignore:local reparameterization. these parameters are drawn")
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_spectral_norm_of_the_old_style_is_drawn():
    net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(), local_reparameterization=True)
    guide = AutoRadial(model)
    assert torch.isfinite(torch.tensor(TermsELBO().loss(model, guide, X, torch.zeros(6, 2))))
