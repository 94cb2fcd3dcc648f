# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An output that is the gradient of another one with respect to the input."""

import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoMeanField, SupervisedModel
from pyro_radial.nn import BayesianModule, likelihoods
from tests.helpers.networks import WithForce, at, call_with, draws_of

X = torch.linspace(-1.0, 1.0, 10).reshape(5, 2).double()


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return WithForce(net).double()


def model_of(net=None, **options):
    observed = {"energy": likelihoods.Gaussian(scale=0.1), "force": likelihoods.Gaussian(scale=0.2)}
    return SupervisedModel(BayesianModule(net or network()), observed, **options)


def differences(function, x, step=1e-5):
    """Central differences of ``[B, 1]`` by each element of ``[B, K]``."""
    steps = step * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.cat([(function(x + own) - function(x - own)) / (2 * step) for own in steps], -1)


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_each_draw_has_its_own_force(batching):
    bnn = BayesianModule(network())
    bnn._functional.batching = batching
    draws = {name: value.double() for name, value in draws_of(bnn, 3).items()}
    together = call_with(bnn, draws, X)
    for number in range(3):
        plain = bnn.to_module(at(draws, number))
        torch.testing.assert_close(together["force"][number], -differences(plain.net, X), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(together["energy"][number], plain.net(X))


def test_local_reparameterization_draws_the_weights_and_says_so():
    """A linear energy has the same force in each row; local noise would give each row its own."""
    model = model_of(WithForce(nn.Linear(2, 1)).double(), local_reparameterization=True)
    guide = AutoMeanField(model, init_stddev=0.5)
    y = {"energy": X[:, :1], "force": X.cos()}
    guide.setup(X, y)
    trace = poutine.trace(poutine.replay(model, trace=poutine.trace(guide).get_trace(X, y)))
    with pytest.warns(UserWarning, match=r"net\.weight: its input is differentiated, and noise for each row"):
        nodes = trace.get_trace(X, y).nodes
    force, energy = nodes["force.f"]["value"], nodes["energy.f"]["value"]
    torch.testing.assert_close(force, force[:1].expand(5, 2))
    torch.testing.assert_close(
        energy + (force * X).sum(-1, keepdim=True), (energy[:1] + (force * X)[:1].sum()).expand(5, 1)
    )


def test_inputs_without_a_gradient_are_named():
    with pytest.raises(ValueError, match=r"the network of bnn.*failed.*given x of shape \[5, 2\], torch.int64"):
        model_of()(torch.zeros(5, 2, dtype=torch.long))
