# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An output that is the gradient of another one with respect to the input."""

import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoMeanField, SupervisedModel
from pyro_radial.nn import BayesianModule, InputGradient, likelihoods
from tests.helpers.networks import at, call_with, draws_of

X = torch.linspace(-1.0, 1.0, 10).reshape(5, 2).double()


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return InputGradient(net, "energy", "force", -1.0).double()


def model_of(net=None, **options):
    observed = {"energy": likelihoods.Gaussian(scale=0.1), "force": likelihoods.Gaussian(scale=0.2)}
    return SupervisedModel(BayesianModule(net or network()), observed, **options)


def differences(function, x, step=1e-5):
    """Central differences of ``[B, 1]`` by each element of ``[B, K]``."""
    steps = step * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.cat([(function(x + own) - function(x - own)) / (2 * step) for own in steps], -1)


def test_the_force_is_the_negative_of_central_differences():
    outputs = network()(X)
    torch.testing.assert_close(outputs["force"], -differences(network().net, X), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(outputs["energy"], network().net(X))


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


def test_an_array_of_positions_and_further_inputs():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, positions, charges):
            return {"energy": ((positions.square().sum(-1) * self.weight) * charges).sum(-1), "other": charges}

    outputs = InputGradient(Pairs(), "energy", "slope")(X[:4].reshape(2, 2, 2).repeat(1, 2, 1)[:, :3], torch.ones(2, 3))
    assert outputs.keys() == {"energy", "other", "slope"}
    torch.testing.assert_close(outputs["slope"], 2 * X[:4].reshape(2, 2, 2).repeat(1, 2, 1)[:, :3])


def test_local_reparameterization_draws_the_weights_and_says_so():
    """A linear energy has the same force in each row; local noise would give each row its own."""
    model = model_of(InputGradient(nn.Linear(2, 1), "energy", "force", -1.0).double(), local_reparameterization=True)
    guide = AutoMeanField(model, init_stddev=0.5)
    y = {"energy": X[:, :1], "force": X.cos()}
    guide.setup(X, y)
    trace = poutine.trace(poutine.replay(model, trace=poutine.trace(guide).get_trace(X, y)))
    with pytest.warns(UserWarning, match=r"net\.weight: InputGradient differentiates it, and noise for each row"):
        nodes = trace.get_trace(X, y).nodes
    force, energy = nodes["force.f"]["value"], nodes["energy.f"]["value"]
    torch.testing.assert_close(force, force[:1].expand(5, 2))
    torch.testing.assert_close(
        energy + (force * X).sum(-1, keepdim=True), (energy[:1] + (force * X)[:1].sum()).expand(5, 1)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, "energy", "force"), "net must be a Module, got int"),
        ((nn.Linear(2, 1), 3, "force"), "of must be a str, got int"),
        ((nn.Linear(2, 1), "energy", "energy"), "name must differ from the output's name, of='energy', got 'energy'"),
        ((nn.Linear(2, 1), "energy", "force", "-"), "factor must be a finite number, got '-'"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        InputGradient(*arguments)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(2, 3), r"net must return one number for each of 5 rows as 'energy', got \(5, 3\)"),
        (
            InputGradient(nn.Linear(2, 1), "other", "slope"),
            r"net must have an output 'energy' .*got outputs \['other', ",
        ),
        (InputGradient(nn.Linear(2, 1), "energy", "force"), "must have an output 'energy' and none 'force'"),
    ],
)
def test_outputs_that_cannot_be_differentiated_are_named(net, message):
    with pytest.raises(ValueError, match=message):
        InputGradient(net, "energy", "force")(X.float())
