# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Targets that are partly observed, against the density of the observed ones."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.nn.likelihoods import MaskedGaussian

NAN = math.nan


def test_unobserved_targets_do_not_count():
    f = torch.randn(3, 2, requires_grad=True)
    y = torch.tensor([[NAN, 1.0], [2.0, NAN], [0.5, -1.0]])
    scale = torch.tensor(0.7)
    value = MaskedGaussian().observation(f, scale=scale).log_prob(y)
    known = dist.Normal(f, scale).log_prob(y.nan_to_num())
    expected = torch.stack([known[0, 1], known[1, 0], known[2].sum()])
    assert torch.equal(value, expected)
    gradient, of_known = (torch.autograd.grad(v.sum(), f, retain_graph=True)[0] for v in (value, expected))
    assert torch.equal(gradient, of_known)
    assert gradient.isfinite().all()


def test_an_infinite_target_is_named():
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), MaskedGaussian())
    with pytest.raises(ValueError, match="y must hold finite values, or NaN where nothing was observed"):
        model(torch.zeros(1, 3), torch.tensor([[math.inf, NAN]]))
