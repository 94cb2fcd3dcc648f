# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks with activation checkpointing, sparse gradients, old-style norms, complex weights and awkward names."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, TermsELBO, fit
from pyro_radial.nn import likelihoods
from tests.helpers.networks import Net

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.linspace(0, 1, 8).reshape(8, 1)


class Checkpointed(nn.Module):
    """Of which a part, no module of its own, runs again in the backward pass."""

    def __init__(self, recomputes):
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 1)
        self.recomputes = recomputes

    def hidden(self, x):
        return self.first(x).tanh()

    def forward(self, x):
        x = self.norm(x)
        hidden = checkpoint(self.hidden, x, use_reentrant=False) if self.recomputes else self.hidden(x)
        return self.second(hidden)


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_a_network_that_changes_its_inputs_changes_no_rows_of_the_caller(batching):
    torch.manual_seed(0)
    x = torch.randn(5, 2)
    bnn, rows = BayesianModule(Net(lambda net, x: net.layer(x.sub_(1.0).div_(2.0)), layer=nn.Linear(2, 1))), x.clone()
    bnn._functional.batching = batching
    weights = {"layer.weight": torch.randn(3, 1, 2), "layer.bias": torch.randn(3, 1)}
    expected = torch.einsum("ne,soe->sno", (x - 1) / 2, weights["layer.weight"]) + weights["layer.bias"][:, None]
    for _ in range(2):
        torch.testing.assert_close(bnn.at(weights, rows), expected)
        torch.testing.assert_close(bnn.at({name: w[0] for name, w in weights.items()}, rows), expected[0])
    assert torch.equal(rows, x)


def model_of(net):
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=8, scale=0.5))


def loss_and_gradients(recomputes, steps=2, **options):
    pyro.set_rng_seed(0)
    model = model_of(Checkpointed(recomputes))
    guide = AutoMeanField(model)
    guide.setup(X, Y)
    module = TermsELBO(**options)(model, guide)
    loss = sum(module(X, Y) for _ in range(steps))
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters()), *model.bnn.net.buffers()]


@pytest.mark.filterwarnings("ignore:running statistics are not updated")
@pytest.mark.parametrize("options", [{}, {"num_particles": 2}, {"num_particles": 3, "vectorize_particles": True}])
def test_activation_checkpointing_changes_neither_gradients_nor_buffers(options):
    plain, checkpointed = loss_and_gradients(False, **options), loss_and_gradients(True, **options)
    torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_random_embedding_with_sparse_gradients_trains(vectorize):
    model = model_of(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)))
    loss = TermsELBO(num_particles=2, vectorize_particles=vectorize)
    result = fit(model, AutoMeanField(model), (torch.arange(8) % 5, Y), epochs=2, loss=loss, progress=False)
    assert math.isfinite(result.history[-1]["loss"])


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_an_old_style_weight_norm_is_refused_with_the_module_and_the_cure():
    net = nn.Sequential(nn.Linear(3, 2), nn.utils.weight_norm(nn.Linear(2, 1)))
    with pytest.raises(ValueError, match=r"'weight' of module '1' \(Linear\).*torch.nn.utils.parametrizations"):
        BayesianModule(net)
    new = nn.Sequential(nn.Linear(3, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)))
    model = model_of(new)
    assert TermsELBO()(model, AutoMeanField(model))(X, Y).isfinite()


def test_complex_weights_are_refused_with_the_cure():
    net = nn.Linear(3, 1, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' of torch.complex64; leave it out .*view_as_complex"):
        BayesianModule(net)


def named_weight(name):
    return Net(lambda net, x: (x * getattr(net, name)).sum(-1, keepdim=True), **{name: nn.Parameter(torch.ones(3))})


@pytest.mark.parametrize("name", ["f", "y", "data", "noise_scale", "precision"])
def test_a_parameter_named_as_a_site_of_the_likelihood_is_refused_and_the_cure_helps(name):
    likelihood = likelihoods.Gaussian(num_data=8, precision_prior=dist.Gamma(1.0, 1.0))
    with pytest.raises(ValueError, match=rf"got \['{name}'\].*torch.nn.Sequential"):
        SupervisedModel(BayesianModule(named_weight(name)), likelihood)
    model = SupervisedModel(BayesianModule(nn.Sequential(named_weight(name))), likelihood)
    assert TermsELBO()(model, AutoMeanField(model))(X, Y).isfinite()


def test_a_parameter_named_as_a_site_that_this_likelihood_does_not_use_is_fine():
    assert model_of(named_weight("precision")).bnn.sites == ("precision",)
