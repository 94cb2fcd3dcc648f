# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pyro's ``get_dependencies`` and ``render_model`` read our models and guides: what depends on what, and no more."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.inspect import get_dependencies, get_model_relations
from pyro.ops.provenance import ProvenanceTensor
from torch import nn

from pyro_radial.distributions import RadialNormal, VonMisesFisherStable
from tests.tables import GUIDES

X = torch.randn(5, 3)

# Of a number that the model draws and of one that it learns.
DISTRIBUTIONS = {
    "RadialNormal": lambda a, b: RadialNormal(a * torch.ones(4), b.exp()),
    "RadialNormalMatrix": lambda a, b: RadialNormal(a, b.exp().expand(2, 3), 2).expand([2]).to_event(1),
    "RadialNormalNoEvent": lambda a, b: RadialNormal(a.expand(2), b.exp(), 0),
    "VonMisesFisherCircle": lambda a, b: VonMisesFisherStable(torch.stack([a.sin(), a.cos()]), b.exp()),
    "VonMisesFisherStable": lambda a, b: VonMisesFisherStable(
        nn.functional.normalize(a + torch.ones(5), dim=-1), b.exp()
    ),
}


def two_numbers(make):
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.param("b", torch.tensor(0.3))
        pyro.sample("w", make(a, b))

    return model


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_distribution_depends_on_what_its_arguments_do(make):
    model = two_numbers(make)
    assert get_dependencies(model)["prior_dependencies"] == {"a": {"a": set()}, "w": {"a": set(), "w": set()}}
    relations = get_model_relations(model)
    assert (relations["sample_sample"]["w"], relations["sample_param"]["w"]) == (["a"], ["b"])


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_shapes_are_sizes_of_tensors_that_pyro_follows(make):
    followed = ProvenanceTensor(torch.tensor(0.3), frozenset({"a"}))
    distribution, plain = make(followed, followed), make(torch.tensor(0.3), torch.tensor(0.3))
    for shape, expected in (
        (distribution.batch_shape, plain.batch_shape),
        (distribution.event_shape, plain.event_shape),
        (distribution.expand([2, *plain.batch_shape]).batch_shape, torch.Size([2, *plain.batch_shape])),
    ):
        assert type(shape) is torch.Size
        assert shape == expected


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)
def test_a_guide_is_read(make):
    def model(x):
        pyro.sample("matrix", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        pyro.sample("bias", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("noise", dist.LogNormal(0.0, 1.0))

    guide = make(model)
    guide(X)
    assert get_dependencies(guide, (X,))["prior_dependencies"] == {
        name: {name: set()} for name in ("matrix", "bias", "noise")
    }
    learned = get_model_relations(guide, (X,))["sample_param"]
    assert all(name in parameter for name, parameters in learned.items() for parameter in parameters)
    assert all(learned.values())
