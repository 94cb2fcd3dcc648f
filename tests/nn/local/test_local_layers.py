# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import warnings

import pyro
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import local_reparameterization

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.shared(self.shared(self.first(x)))


class Elsewhere(nn.Module):
    """An autoencoder whose decoder is its encoder's transpose."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(nn.functional.linear(self.encoder(x), self.encoder.weight.T))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x)))


class Flat(nn.Module):
    """Computes two positions of a row as two rows."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(2, 3), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.first(x.reshape(-1, 2)).reshape(len(x), -1))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.embedding((x > 0).long()).sum(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        x = x.reshape(len(x), 2, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.cells(x.reshape(len(x), 2, 2))[0][:, -1])


# By network: the parameters that are drawn, and a word of the reason.
DRAWN = {
    "a layer called twice": (Twice, ["shared.weight", "shared.bias"], "called more than once"),
    "a weight used elsewhere": (Elsewhere, ["encoder.weight", "encoder.bias"], "outside of its layer"),
    "a tied weight": (Tied, ["first.weight"], "the same as second.weight"),
    "positions as rows": (Flat, ["first.weight", "first.bias"], "no row for each of 6 rows"),
    "a subclass": (lambda: nn.Sequential(Scaled(4, 3), nn.Linear(3, 2)), ["0.weight", "0.bias"], "Scaled has no local"),
    "an embedding": (Tokens, ["embedding.weight"], "Embedding has no local"),
    "attention": (
        Attention,
        ["attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias"],
        "MultiheadAttention has no local",
    ),
    "a recurrent layer": (
        Recurrent,
        ["cells.weight_ih_l0", "cells.weight_hh_l0", "cells.bias_ih_l0", "cells.bias_hh_l0"],
        "LSTM has no local",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        "batch norm '1' in train mode mixes rows",
    ),
    "one row for all": (
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(0), nn.Unflatten(0, (2, 6))),
        ["0.weight", "0.bias"],
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
        outputs(bnn, guide)
    (message,) = (str(warning.message) for warning in caught)
    assert [name for name in bnn.sites if f"{name}:" in message] == drawn
    assert torch.isfinite(outputs(bnn, guide)).all()


@each_network
def test_all_particles_have_noise_of_their_own(make, drawn, why):
    bnn, guide = guided(make())
    model = SupervisedModel(bnn, likelihoods.Gaussian())
    elbo = TermsELBO(3, vectorize_particles=True, max_plate_nesting=1)
    y = torch.zeros(bnn(X).shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        elbo(model, local_reparameterization(guide))(X, y).backward()
        trace = pyro.poutine.trace(elbo._vectorized_num_particles(local_reparameterization(guide))).get_trace(X)
        f = pyro.poutine.replay(elbo._vectorized_num_particles(bnn), trace=trace)(X)
    assert f.shape == (3, *y.shape)
    assert not torch.allclose(f[0], f[1])
    assert all(torch.isfinite(p.grad).all() for p in guide.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["a layer called twice", "positions as rows", "a recurrent layer", "batch norm"])
def test_the_spread_is_that_of_drawn_weights(name):
    bnn, guide = guided(DRAWN[name][0](), stddev=0.05)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        local = torch.stack([outputs(bnn, guide) for _ in range(200)])
        whole = torch.stack([pyro.poutine.condition(bnn, data=guide(X))(X) for _ in range(200)])
    error = (local.var(0) / 200 + whole.var(0) / 200).sqrt()
    assert bool(((local.mean(0) - whole.mean(0)).abs() < 4.5 * error).all())
    # Of a variance that 200 nearly normal numbers estimate, and of several at once.
    ratios = (local.var(0) / whole.var(0)).log()
    assert float(ratios.abs().max()) < 5 * (4 / 200) ** 0.5


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
    class Counted(Twice):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    bnn, guide = guided(Counted())
    before = float(bnn.net.calls)
    with pytest.warns(UserWarning, match="called more than once"):
        outputs(bnn, guide)
    assert float(bnn.net.calls) == before + 1


def test_a_network_that_recomputes_parts_gets_the_same_noise_again():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return checkpoint(lambda a: self.second(torch.tanh(a)), self.first(x), use_reentrant=False)

    class Plain(Checkpointed):
        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    gradients = []
    for make in (Checkpointed, Plain):
        torch.manual_seed(0)
        bnn, guide = guided(make())
        # The first call finds out how to run the network.
        outputs(bnn, guide)
        assert len(outputs(bnn, guide, X[:1].expand(6, 4)).unique(dim=0)) == 6
        torch.manual_seed(1)
        x = X.clone().requires_grad_()
        f = outputs(bnn, guide, x)
        f.square().sum().backward()
        gradients.append([f.detach(), *(p.grad for p in guide.parameters())])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def fixed(layer, name, value):
    """A layer with a tensor that is no parameter."""
    delattr(layer, name)
    layer.register_buffer(name, value)
    return layer


def plain(layer, name, value):
    delattr(layer, name)
    setattr(layer, name, value)
    return layer


@pytest.mark.parametrize("make", [fixed, plain])
@pytest.mark.parametrize("name", ["bias", "weight"])
@pytest.mark.filterwarnings("ignore:local reparameterization. these parameters are drawn")
def test_a_tensor_that_is_no_parameter_counts(make, name):
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    net = make(layer, name, torch.full_like(getattr(layer, name).detach(), 100.0))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(), local_reparameterization=True)
    guide = AutoMeanField(model)
    y = net(X).detach()
    torch.testing.assert_close(pyro.poutine.trace(model).get_trace(X).nodes["f"]["value"].shape, y.shape)
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
