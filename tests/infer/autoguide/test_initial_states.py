# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A guide starts at given distributions, and says how far its scales have moved since."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.autoguide import AutoMeanField
from tests.helpers.models import matrix_model


def test_scale_change_is_the_log_ratio_to_the_start():
    guide = AutoRadial(matrix_model)
    guide.setup()
    assert guide.scale_change()["weight"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        raw = guide.scales.weight_unconstrained
        scale = nn.functional.softplus(raw)
        raw.copy_((2 * scale).expm1().log())
    assert guide.scale_change()["weight"] == pytest.approx(math.log(2.0), rel=1e-4)


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
