# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The function of a model for given values of its sites."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.func import vmap

from pyro_radial import BayesianModule, PriorChain, SupervisedModel
from pyro_radial.nn import likelihoods
from pyro_radial.nn.linearized.site_function import SiteFunction
from pyro_radial.poutine import swap_prior
from tests.helpers.linear_models import by_hand, inputs

X = torch.randn(4, 3)
VALUES = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}


def supervised():
    return SupervisedModel(BayesianModule(nn.Linear(3, 2)), likelihoods.Categorical(num_data=9))


@pytest.mark.parametrize(
    "model",
    [
        BayesianModule(nn.Linear(3, 2)),
        supervised(),
        PriorChain(supervised()),
        swap_prior(supervised(), {"bias": dist.Normal(1.0, 2.0).expand([2]).to_event(1)}),
    ],
    ids=lambda model: type(model).__name__,
)
def test_it_is_the_function_at_these_values(model):
    expected = X @ VALUES["weight"].mT + VALUES["bias"]
    torch.testing.assert_close(SiteFunction(model)(VALUES, X), expected)


def test_what_follows_the_function_draws_no_number_and_works_for_mapped_rows():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            f = pyro.deterministic("f", x @ w)
            pyro.sample("count", dist.Poisson(f.exp()))
            pyro.sample("y", dist.Normal(f, f.exp()), obs=y)

    before = torch.get_rng_state()
    function, values = SiteFunction(model), {"w": torch.ones(3)}
    assert function(values, X).shape == (4, 1)
    mapped = vmap(lambda row: function(values, row.unsqueeze(0)).squeeze(0))(X)
    assert torch.allclose(mapped, function(values, X))
    assert torch.equal(before, torch.get_rng_state())


def test_other_sites_are_at_their_centers_and_handlers_further_out_see_none():
    def model(x):
        w = pyro.sample("w", dist.Normal(2.0, 1.0).expand([3]).to_event(1))
        b = pyro.sample("b", dist.LogNormal(0.5, 1.0))
        pyro.deterministic("values", x @ w + b)

    with poutine.trace() as capture:
        found = SiteFunction(model, "values")({"w": torch.ones(3)}, X)
    torch.testing.assert_close(found, (X.sum(-1) + torch.tensor(0.5).exp()).unsqueeze(-1))
    assert not list(capture.trace.stochastic_nodes)


def test_dependence_is_on_what_the_function_is_computed_from():
    function = SiteFunction(by_hand)
    values = {"weight": torch.zeros(2, 5, dtype=torch.double)}
    assert function.dependence(values, inputs()) == (("weight",), ())
    assert function.dependence({"noise": torch.ones(()), **values}, inputs()) == (("weight",), ())
    assert function.dependence({"noise": torch.ones((), dtype=torch.double)}, inputs()) == ((), ("weight",))


@pytest.mark.parametrize("values", [None, torch.zeros(3), torch.zeros(4, dtype=torch.long)])
def test_a_model_without_values_at_the_inputs_is_named(values):
    def model(x):
        if values is not None:
            pyro.deterministic("f", values)

    with pytest.raises(ValueError, match="real values for each of 4 inputs at a site 'f', got"):
        SiteFunction(model)({}, X)


def test_a_site_without_a_center_must_be_given():
    def model(x):
        pyro.sample("w", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match="posterior must have site 'w' of the model, whose prior has no center"):
        SiteFunction(model)({}, X)
