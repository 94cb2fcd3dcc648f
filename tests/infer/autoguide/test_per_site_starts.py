# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.autoguide import AutoMeanField
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


def test_scale_change_is_the_log_ratio_to_the_start():
    guide = AutoRadial(matrix_model)
    guide.setup()
    assert guide.scale_change()["weight"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        raw = guide.scales.weight_unconstrained
        scale = nn.functional.softplus(raw)
        raw.copy_((2 * scale).expm1().log())
    assert guide.scale_change()["weight"] == pytest.approx(math.log(2.0), rel=1e-4)


# start_at

START = {
    "weight": RadialNormal(torch.rand(5, 4), 0.1 + torch.rand(5, 4), 2),
    "bias": dist.Normal(torch.rand(5), 0.1 + torch.rand(5)).to_event(1),
}
FAMILIES = {
    "radial": (AutoRadial, {"weight": 20, "bias": 5}),
    "radial rows": (lambda model: AutoRadial(model, event_dim=1), {"weight": 4, "bias": 5}),
    "mean field": (AutoMeanField, {"weight": 1, "bias": 1}),
}


def started(family=AutoRadial, distributions=START, model=matrix_model, **kwargs):
    guide = family(model)
    guide.start_at(distributions, **kwargs)
    guide.setup()
    return guide


@pytest.mark.parametrize(("family", "elements"), FAMILIES.values(), ids=FAMILIES.keys())
def test_a_guide_starts_at_the_mean_and_the_variance_of_each_element(family, elements):
    guide = started(family)
    for name, distribution in START.items():
        posterior = guide.posterior()[name]
        assert torch.equal(guide.median()[name], distribution.mean)
        torch.testing.assert_close(posterior.variance, distribution.variance)
        scale = getattr(guide.scales, name)
        # A scale is the standard deviation times the root of how many elements share a radius.
        torch.testing.assert_close(scale, distribution.stddev * math.sqrt(elements[name]))
    # The map that keeps scales positive rounds.
    assert max(guide.scale_change().values()) < 1e-5


def test_scales_may_stay_where_the_family_starts_them_and_sites_without_a_distribution_too():
    guide = started(lambda model: AutoRadial(model, init_stddev=0.3), scales=False)
    assert torch.equal(guide.median()["weight"], START["weight"].mean)
    torch.testing.assert_close(guide.scales.weight, torch.full((5, 4), 0.3 * math.sqrt(20)))
    guide = started(distributions={"bias": START["bias"], "unknown": START["bias"]})
    torch.testing.assert_close(guide.scales.weight, torch.full((5, 4), 0.1 * math.sqrt(20)))
    torch.testing.assert_close(guide.posterior()["bias"].stddev, START["bias"].stddev)


def test_a_distribution_of_one_row_starts_all_rows_of_a_plate():
    def model():
        with pyro.plate("rows", 6):
            pyro.sample("z", dist.Normal(0.0, 1.0).expand([5]).to_event(1))

    guide = started(model=model, distributions={"z": START["bias"]})
    assert torch.equal(guide.median()["z"], START["bias"].mean.expand(6, 5))
    torch.testing.assert_close(guide.posterior()["z"].variance, START["bias"].variance.expand(6, 5))


def test_a_constrained_site_starts_in_unconstrained_space():
    base = START["bias"]

    def rates():
        pyro.sample("rate", dist.Gamma(2.0, 1.0).expand([5]).to_event(1))

    pushforward = dist.TransformedDistribution(base, [dist.transforms.ExpTransform()])
    for distribution in (pushforward, dist.LogNormal(base.mean, base.stddev).to_event(1)):
        guide = started(model=rates, distributions={"rate": distribution})
        torch.testing.assert_close(guide.locs.rate, base.mean)
        torch.testing.assert_close(guide.posterior()["rate"].base_dist.variance, base.variance)
    # Any other distribution has a mean alone.
    guide = started(model=rates, distributions={"rate": dist.Gamma(torch.full((5,), 6.0), 2.0).to_event(1)})
    torch.testing.assert_close(guide.median()["rate"], torch.full((5,), 3.0))
    torch.testing.assert_close(guide.scales.rate, torch.full((5,), 0.1 * math.sqrt(5)))


def test_a_start_is_refused_too_late_and_in_the_wrong_shape():
    guide = AutoRadial(matrix_model)
    guide.start_at({"bias": dist.Normal(torch.zeros(4), 1.0).to_event(1)})
    with pytest.raises(ValueError, match=r"site 'bias' has shape \(4,\).*\(5,\)"):
        guide.setup()
    guide = started()
    with pytest.raises(RuntimeError, match=r"AutoRadial.start_at: the guide already has parameters"):
        guide.start_at(START)
