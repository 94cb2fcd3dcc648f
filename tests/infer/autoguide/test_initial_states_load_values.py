# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Guides take the means of a trained network and given standard deviations, and name what does not fit."""

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.nn import likelihoods
from tests.helpers.models import matrix_model
from tests.helpers.scale_priors import HyperScale

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_load_means_takes_a_trained_network_and_leaves_the_scales():
    net = nn.Linear(4, 2)
    model = SupervisedModel(BayesianModule(nn.Linear(4, 2), HyperScale()), likelihoods.Gaussian(num_data=10))
    guide = AutoRadial(model)
    guide.setup(X, torch.randn(6, 2))
    with pytest.raises(ValueError, match="weight_prior_scale"):
        guide.load_means(net.state_dict())
    missing = guide.load_means(net.state_dict(), strict=False)
    assert set(missing.missing_sites) == {"weight_prior_scale", "bias_prior_scale"}
    assert torch.equal(guide.median()["weight"], net.weight)
    assert guide.scale_change()["weight"] == pytest.approx(0.0, abs=1e-6)
    guide.load_means({"weight_prior_scale": torch.tensor(0.7)}, strict=False)
    assert guide.median()["weight_prior_scale"] == pytest.approx(0.7)
    with pytest.raises(ValueError, match="'weight'"):
        guide.load_means(nn.Linear(3, 2).state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="setup"):
        AutoRadial(model).load_means(net.state_dict())


def test_load_means_leaves_out_no_other_tensors_of_a_network():
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=10))
    guide = AutoRadial(model)
    guide.setup(X, torch.randn(6, 2))
    guide.load_means(net.state_dict())
    net(X)
    with pytest.raises(ValueError, match=r"other values of \['1.running_mean', '1.running_var', '1.num_b"):
        guide.load_means(net.state_dict(), strict=False)
    larger = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=10))
    guide = AutoRadial(larger)
    guide.setup(X, torch.randn(6, 2))
    with pytest.raises(ValueError, match=r"state_dict must have .* values of \['3.weight'\]"):
        guide.load_means(net.append(nn.Linear(2, 2, bias=False)).state_dict())


def test_load_means_names_values_without_a_site_of_a_function():
    def model():
        pyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoRadial(model)
    guide.setup()
    values = {"weight": torch.ones(3), "net.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"values of the sites \['weight'\] only, got \['net.weight'\]; strict=False"):
        guide.load_means(values)
    assert guide.load_means(values, strict=False).missing_sites == []
    assert torch.equal(guide.median()["weight"], torch.ones(3))
    # A guide from a file does not know what its model has besides sites.
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded.load_means(values).missing_sites == []


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("weight", math.nan, "'weight', got 1 of 8 elements"),
        ("weight", math.inf, "'weight', got 1 of 8 elements"),
        ("weight_prior_scale", -1.0, "'weight_prior_scale', got 1 of 1 elements"),
    ],
)
def test_load_means_names_a_site_with_a_value_that_no_mean_can_have(name, bad, words):
    model = SupervisedModel(BayesianModule(nn.Linear(4, 2), HyperScale()), likelihoods.Gaussian(num_data=10))
    guide = AutoRadial(model)
    guide.setup(X, torch.randn(6, 2))
    before = guide.median()
    values = {site: value + 1.0 for site, value in before.items()}
    values[name].view(-1)[0] = bad
    with pytest.raises(ValueError, match=f"state_dict must have finite values inside the support of site {words}"):
        guide.load_means(values)
    # Nothing was loaded by half.
    for site, value in guide.median().items():
        assert torch.equal(value, before[site])


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField, lambda model: AutoRadial(model, event_dim=1)])
def test_the_marginal_standard_deviation_is_what_was_set(make):
    guide = make(matrix_model)
    guide.setup()
    means = guide.median()
    stddevs = {"weight": torch.linspace(0.1, 2.0, 4).expand(5, 4), "bias": torch.tensor(1e-3)}
    guide.set_stddevs(stddevs)
    for name, distribution in guide.posterior().items():
        torch.testing.assert_close(distribution.stddev, stddevs[name].expand(means[name].shape), rtol=1e-5, atol=0.0)
        assert torch.equal(guide.median()[name], means[name])


def test_points_have_no_location_and_scale():
    def model():
        matrix_model()
        pyro.sample("precision", dist.Gamma(2.0, 1.0))

    guide = AutoRadial(model, families={"bias": Delta()})
    guide.setup()
    assert list(guide.loc_scale_sites()) == ["weight", "precision"]


def test_stddevs_that_do_not_fit_are_named():
    guide = AutoRadial(matrix_model)
    with pytest.raises(RuntimeError, match=r"guide has no parameters yet; call guide.setup"):
        guide.loc_scale_sites()
    guide.setup()
    with pytest.raises(ValueError, match="scales must be positive and finite, got others at site 'weight'"):
        guide.set_stddevs({"weight": torch.tensor(float("inf"))})
    with pytest.raises(ValueError, match=r"broadcast to site 'bias' of shape \(5,\), got shape \(2,\)"):
        guide.set_stddevs({"bias": torch.ones(2)})
