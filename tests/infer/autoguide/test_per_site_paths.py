# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Guides of models in which one site is named below another, as hierarchical priors of one's own have them."""

import copy
import io
import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel, TermsELBO, predict
from pyro_radial.infer.autoguide.per_site import parameter_paths
from pyro_radial.nn import likelihoods
from tests.tables import GUIDES


class Hierarchical:
    """A normal prior whose scale is a site below the parameter's."""

    def __init__(self, suffix):
        self.suffix = suffix

    def sample_parameter(self, name, parameter):
        scale = pyro.sample(name + self.suffix, dist.LogNormal(0.0, 0.1))
        scale = scale.reshape(scale.shape + (1,) * parameter.dim())
        prior = dist.Normal(torch.zeros_like(parameter), scale).to_event(parameter.dim())
        return pyro.sample(name, prior, infer={"initial_value": parameter})


def hierarchical_model(suffix=".lam"):
    pyro.set_rng_seed(0)
    bnn = BayesianModule(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), Hierarchical(suffix))
    return SupervisedModel(bnn, likelihoods.Gaussian(num_data=4, scale=0.5))


DATA = torch.ones(4, 2), torch.ones(4, 1)


def trained(model, make):
    guide = make(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TermsELBO())
    for _ in range(2):
        svi.step(*DATA)
    return guide


@pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)
def test_a_site_below_another_is_trained_stored_and_copied(make):
    model = hierarchical_model()
    guide, fresh = trained(model, make), make(model)
    fresh.setup(*DATA)
    assert {"0.weight", "0.weight.lam"} < set(guide.posterior())
    for name, value in guide.median().items():
        assert (value != fresh.median()[name]).any(), name
    assert predict(model, guide, DATA[0], num_samples=3).mean.shape == (4, 1)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for twin in (fresh, copy.deepcopy(guide)):
        for name, value in guide.median().items():
            assert torch.equal(twin.median()[name], value), name


def test_guides_of_pyro_s_with_one_vector_take_such_names_and_the_others_take_another():
    trained(hierarchical_model(), AutoMultivariateNormal)
    for family in (AutoNormal, AutoDelta):
        with pytest.raises((AttributeError, KeyError)):
            trained(hierarchical_model(), family)
        trained(hierarchical_model(suffix="_lam"), family)


def test_paths_do_not_collide_whatever_the_sites_are_called():
    names = ["w", "w.own", "w.own.b", "w.own_", "v", "v.a.b", "v.a", "u"]
    paths = parameter_paths(names)
    assert paths == {name: name for name in names} | {
        "w": "w.own__",
        "w.own": "w.own.own",
        "v": "v.own",
        "v.a": "v.a.own",
    }
    pairs = itertools.permutations(paths.values(), 2)
    assert not any(b.startswith(f"{a}.") for a, b in pairs)
