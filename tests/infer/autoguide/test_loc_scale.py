# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods, priors
from tests.infer.autoguide.models import matrix_model

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_load_means_takes_a_trained_network_and_leaves_the_scales():
    net = nn.Linear(4, 2)
    model = SupervisedModel(BayesianModule(nn.Linear(4, 2), priors.HyperScale()), likelihoods.Gaussian(10))
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


def test_scale_change_is_the_log_ratio_to_the_start():
    guide = AutoRadial(matrix_model)
    guide.setup()
    assert guide.scale_change()["weight"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        raw = guide.scales.weight_unconstrained
        scale = nn.functional.softplus(raw)
        raw.copy_((2 * scale).expm1().log())
    assert guide.scale_change()["weight"] == pytest.approx(math.log(2.0), rel=1e-4)


def test_subsampled_rows_are_selected_not_averaged():
    def model(rows):
        with pyro.plate("rows", 5, subsample=rows):
            pyro.sample("local", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoRadial(model, create_plates=lambda rows: pyro.plate("rows", 5, subsample=rows))
    guide.setup(torch.arange(5))
    with torch.no_grad():
        guide.locs.local_unconstrained.copy_(torch.arange(5.0)[:, None].expand(5, 3))
    law = poutine.trace(guide).get_trace(torch.tensor([3, 1])).nodes["local"]["fn"]
    assert torch.equal(law.loc.detach(), torch.tensor([[3.0] * 3, [1.0] * 3]))
