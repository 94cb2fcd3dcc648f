# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Standard deviations are set as they are asked for, in every family that has scales."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoMeanField, AutoRadial
from pyro_radial.infer.autoguide.families import Delta
from tests.helpers.models import matrix_model


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField, lambda model: AutoRadial(model, event_dim=1)])
def test_the_marginal_standard_deviation_is_what_was_set(make):
    guide = make(matrix_model)
    guide.setup()
    means = guide.median()
    wanted = {"weight": torch.linspace(0.1, 2.0, 4).expand(5, 4), "bias": torch.tensor(1e-3)}
    guide.set_stddevs(wanted)
    for name, distribution in guide.posterior().items():
        torch.testing.assert_close(distribution.stddev, wanted[name].expand(means[name].shape), rtol=1e-5, atol=0.0)
        assert torch.equal(guide.median()[name], means[name])


def test_points_have_no_location_and_scale():
    def model():
        matrix_model()
        pyro.sample("precision", dist.Gamma(2.0, 1.0))

    guide = AutoRadial(model, families={"bias": Delta()})
    guide.setup()
    assert list(guide.loc_scale_sites()) == ["weight", "precision"]


def test_bad_input_is_named():
    guide = AutoRadial(matrix_model)
    with pytest.raises(RuntimeError, match=r"guide has no parameters yet; call guide.setup"):
        guide.loc_scale_sites()
    guide.setup()
    with pytest.raises(ValueError, match="scales must be positive and finite, got others at site 'weight'"):
        guide.set_stddevs({"weight": torch.tensor(float("inf"))})
    with pytest.raises(ValueError, match=r"broadcast to site 'bias' of shape \(5,\), got shape \(2,\)"):
        guide.set_stddevs({"bias": torch.ones(2)})
