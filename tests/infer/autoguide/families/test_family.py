# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which family a site gets, and what is refused."""

import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule, SupervisedModel
from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.autoguide.families.family import choose_families
from pyro_radial.nn import likelihoods

X, Y = torch.randn(6, 4), torch.randn(6, 2)
SITES = dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"])


def network():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=6))


def family_names(guide):
    guide.setup(X, Y)
    return {name: type(family).__name__ for name, family in guide._families.items()}


def test_a_name_a_pattern_and_a_function_choose():
    weights = {"0.weight": "Radial", "2.weight": "Radial"}
    biases = {"0.bias": "Normal", "2.bias": "Normal"}
    assert family_names(AutoRadial(network(), families={r"bias$": families.Normal()})) == weights | biases
    chosen = family_names(AutoRadial(network(), families={r"bias$": families.Normal(), "0.bias": families.Delta()}))
    assert chosen == weights | biases | {"0.bias": "Delta"}

    def by_rank(name, site):
        return families.Normal() if site["fn"].event_dim == 1 else None

    assert family_names(AutoRadial(network(), families=by_rank)) == weights | biases


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField, AutoRadialDirectional])
def test_every_guide_mixes_families(guide_type):
    guide = guide_type(network(), families={"0.weight": families.Radial(event_dim=1), "2.bias": families.Delta()})
    guide.setup(X, Y)
    posterior = guide.posterior()
    assert posterior["0.weight"].base_dist.event_shape == (4,)
    assert type(posterior["2.bias"]) is dist.Delta


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"3.weight": families.Normal()}, "'3.weight' names no site and matches none of ['0.bias', '0.weight'"),
        ({"weight": families.Normal(), "^0": families.Delta()}, "site '0.weight' matches 2 patterns, ['weight', '^0']"),
        ({"(": families.Normal()}, "'(' is neither a site nor a valid regular expression"),
        ({"0.bias": families.Normal}, "the value for site '0.bias' must be a Family, got type"),
        (lambda name, site: 1.0, "the value for site '0.weight' must be a Family, got float"),
    ],
)
def test_what_is_no_choice_is_named(wanted, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        choose_families(wanted, SITES)


class NamedLikeAMethod(families.Normal):
    def initial(self, site, value):
        return {"buffer": super().initial(site, value)["loc"]}


@pytest.mark.parametrize(
    ("family", "fn", "words"),
    [
        (families.VonMisesFisher(), dist.Gamma(2.0, 1.0), r"'x' must be a direction, got Gamma on GreaterThan"),
        (
            families.VonMisesFisher(),
            dist.Normal(0.0, 1.0),
            "VonMisesFisher: site 'x' must be a direction, got Normal on",
        ),
        (families.Normal(), HypersphericalUniform(3), r"'x' is a direction \(HypersphericalUniform\)"),
        (families.Radial(), HypersphericalUniform(3), r"'x' is a direction .*ProjectedNormalReparam"),
        (families.Delta(), HypersphericalUniform(3), r"'x' is a direction .*AutoRadialDirectional"),
        (families.Normal(), dist.Poisson(3.0), r"discrete.*'x'|'x'.*discrete"),
        (NamedLikeAMethod(), dist.Normal(0.0, 1.0), r"site 'x'.* must not be called 'buffer'"),
    ],
)
def test_a_family_that_cannot_serve_a_site_names_it_and_its_type(family, fn, words):
    guide = AutoMeanField(lambda: pyro.sample("x", fn), families={"x": family})
    with pytest.raises(ValueError, match=words):
        guide.setup()
