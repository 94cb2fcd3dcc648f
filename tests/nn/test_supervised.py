# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network and a likelihood as one model."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from tests.helpers.networks import classifier, data, draws_of


def test_the_log_density_is_prior_plus_scaled_likelihood():
    model, (x, y) = classifier(num_data=40), data(10)
    trace = poutine.trace(model).get_trace(x, y)
    draw = {site: trace.nodes[site]["value"] for site in model.bnn.sites}
    prior = sum(dist.Normal(0.0, 1.0).log_prob(value).sum() for value in draw.values())
    logits = model.bnn.to_module(draw)(x)
    likelihood = -nn.functional.cross_entropy(logits, y, reduction="sum")
    torch.testing.assert_close(trace.log_prob_sum(), prior + 40 / 10 * likelihood)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, 4), r"x of shape \[5, 4\], torch.float32 on cpu: .*mat1 and mat2 shapes"),
        (
            torch.zeros(5, 3, dtype=torch.float64),
            r"in torch.float32 on cpu, failed in .*given x of shape .* torch.float64",
        ),
        (torch.zeros(5, 3, dtype=torch.long), r"in torch.float32 on cpu, failed in .*given x of shape .* torch.int64"),
    ],
)
def test_inputs_that_the_network_cannot_take_are_named(x, message):
    with pytest.raises(ValueError, match=rf"the network of bnn, .*{message}"):
        classifier()(x, torch.zeros(5, dtype=torch.long))


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.first, self.rest = nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(size, 2))

    def forward(self, x):
        return self.rest(self.first(x) + torch.ones(size if (size := len(x)) > 5 else 1))


@pytest.mark.parametrize("draws", [(), (2,)])
@pytest.mark.parametrize(
    ("net", "rows", "message"),
    [
        (
            lambda: Block(5),
            5,
            r" failed in 'rest\.1', Linear\(in_features=5, .*\), given x of shape \[5, 3\].*: .*mat1",
        ),
        (lambda: nn.Sequential(Block(4)), 6, r" failed in '0', Block\(\), given x of shape .*: .*The size of"),
        (lambda: Block(4), 6, r"the network of bnn, in torch.float32 on cpu, failed, given x .*: .*The size of"),
    ],
)
def test_an_error_inside_the_network_is_shown_with_its_layer(net, rows, message, draws):
    model = classifier(net=net())
    values = draws_of(model.bnn, *draws)
    with pytest.raises(ValueError, match=message), poutine.condition(data=values):
        model(torch.zeros(rows, 3))


def test_a_dict_is_inputs_by_name():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 1), nn.Linear(2, 1)

        def forward(self, a, b):
            return self.left(a) + self.right(b)

    model = SupervisedModel(BayesianModule(Sum()), likelihoods.Gaussian())
    assert model({"b": torch.randn(5, 2), "a": torch.randn(5, 3)}, torch.randn(5, 1)).shape == (5, 1)
    with pytest.raises(ValueError, match=r"given b of shape \[5, 9\], torch.float32 on cpu, a of shape \[5, 3\]"):
        model({"b": torch.randn(5, 9), "a": torch.randn(5, 3)})


def test_a_network_with_several_outputs_is_named():
    model = SupervisedModel(BayesianModule(nn.LSTM(3, 2)), likelihoods.Gaussian(num_data=40))
    with pytest.raises(ValueError, match="must return one tensor, got tuple"):
        model(torch.randn(5, 2, 3))
