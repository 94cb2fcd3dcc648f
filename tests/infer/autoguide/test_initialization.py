# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.autoguide import init_to_network
from pyro_radial.nn import likelihoods

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_the_default_start_of_a_network_is_its_own_weights():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=10))
    for guide in (AutoRadial(model), AutoMeanField(model)):
        guide.setup(X, torch.randn(6, 1))
        for name, parameter in net.named_parameters():
            assert torch.equal(guide.median()[name], parameter)


def test_init_to_network_takes_another_networks_weights():
    net, trained = nn.Linear(4, 2), nn.Linear(4, 2)
    guide = AutoRadial(BayesianModule(net), init_loc_fn=init_to_network(net=trained))
    guide.setup(X)
    assert torch.equal(guide.median()["weight"], trained.weight)


def test_weights_inside_a_plate_all_start_at_the_network():
    bnn = BayesianModule(nn.Linear(4, 2))

    def model(x):
        with pyro.plate("members", 3, dim=-2):
            bnn(x)

    guide = AutoRadial(model)
    guide.setup(X)
    assert guide.median()["weight"].shape == (3, 1, 2, 4)
    assert torch.equal(guide.median()["weight"][2, 0], bnn._initial["weight"])


@pytest.mark.parametrize("event_dim", [0, 1])
def test_given_values_of_the_rows_of_a_batch_are_refused(event_dim):
    """A guide would repeat them over all rows; those of all rows are each row's own."""

    def plate(rows):
        return pyro.plate("rows", 6, subsample=rows, dim=-1)

    def model(rows):
        with plate(rows):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([1] * event_dim).to_event(event_dim))

    values = torch.arange(6.0).reshape(6, *[1] * event_dim)
    guide = AutoMeanField(model, init_loc_fn=init_to_value(values={"z": values}), create_plates=plate)
    guide.setup(torch.arange(3, 6))
    assert torch.equal(next(iter(guide.locs.parameters())).reshape(-1), values.reshape(-1))
    guide = AutoMeanField(model, init_loc_fn=init_to_value(values={"z": values[:3]}), create_plates=plate)
    with pytest.raises(ValueError, match="value of site 'z' must be of all 6 rows of plate 'rows', got 3 rows"):
        guide.setup(torch.arange(3, 6))
