# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Standard deviations are set as they are asked for, in every family that has scales."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoMeanField, AutoRadial
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.infer.autoguide.stddevs import Stddevs
from tests.helpers.models import matrix_model


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField, lambda model: AutoRadial(model, event_dim=1)])
def test_the_marginal_standard_deviation_is_what_was_set(make):
    guide = make(matrix_model)
    guide.setup()
    means = guide.median()
    wanted = {"weight": torch.linspace(0.1, 2.0, 4).expand(5, 4), "bias": torch.tensor(1e-3)}
    Stddevs(guide, "test").set(wanted)
    for name, distribution in guide.posterior().items():
        torch.testing.assert_close(distribution.stddev, wanted[name].expand(means[name].shape), rtol=1e-5, atol=0.0)
        assert torch.equal(guide.median()[name], means[name])


def test_what_is_restored_is_the_same_to_the_last_bit():
    guide = AutoRadial(matrix_model)
    guide.setup()
    stddevs, before = Stddevs(guide, "test"), guide.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    state = stddevs.state()
    stddevs.set({"weight": torch.tensor(3.0)})
    assert not all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
    stddevs.restore(state)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


def test_points_and_positive_sites_are_left_alone():
    def model():
        matrix_model()
        pyro.sample("precision", dist.Gamma(2.0, 1.0))

    guide = AutoRadial(model, families={"bias": Delta()})
    guide.setup()
    assert list(Stddevs(guide, "test").means) == ["weight"]


def test_bad_input_is_named():
    guide = AutoRadial(matrix_model)
    with pytest.raises(ValueError, match=r"test: guide must have its parameters.*load_means"):
        Stddevs(guide, "test")
    with pytest.raises(ValueError, match="guide must be one of this library, such as AutoRadial, got function"):
        Stddevs(matrix_model, "test")
    guide.setup()
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scales must be positive and finite, got others at site 'weight'"):
            Stddevs(guide, "test").set({"weight": torch.tensor(value)})
    with pytest.raises(ValueError, match=r"broadcast to site 'bias' of shape \(5,\), got shape \(2,\)"):
        Stddevs(guide, "test").set({"bias": torch.ones(2)})
    points = AutoRadial(matrix_model, families={".": Delta()})
    points.setup()
    with pytest.raises(ValueError, match=r"a site with a location and a scale, got .*Delta"):
        Stddevs(points, "test")
