# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Errors of the loss that name the culprit."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, diagnose
from pyro_radial.nn import MultiHead, likelihoods, use_head

X, Y = torch.linspace(-1, 1, 24).reshape(8, 3), torch.arange(8) % 2


def two_heads():
    net = MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 2)])
    return SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=8))


def test_a_guide_made_before_use_head_is_told_what_to_call():
    model = two_heads()
    guide = AutoRadial(model)
    TermsELBO()(model, guide)(X, Y)
    use_head(model, 1)
    words = r"site 'heads.1.weight' of the model, got none; .*after use_head: make a new guide"
    for run in (lambda: TermsELBO()(model, guide)(X, Y), lambda: diagnose(model, guide, (X, Y))):
        with pytest.raises(ValueError, match=words):
            run()
    # Both of the cures.
    assert TermsELBO()(model, AutoRadial(model))(X, Y).isfinite()
    use_head(model, 0)
    assert TermsELBO()(model, guide)(X, Y).isfinite()


def test_a_guide_that_lacks_a_site_alone_has_nothing_to_do_with_heads():
    model = two_heads()

    def guide(x, y=None):
        pyro.sample("trunk.weight", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))

    with pytest.raises(ValueError, match=r"'trunk.bias' of the model, got none$"):
        TermsELBO()(model, guide)(X, Y)


@pytest.mark.parametrize("family", [AutoRadial, AutoMeanField, AutoNormal])
def test_a_parameter_of_the_guide_that_is_nan_is_named(family):
    model = two_heads()
    guide = family(model)
    guide(X, Y)
    with torch.no_grad():
        dict(guide.named_parameters())["locs.trunk.bias_unconstrained"][1] = math.nan
    with pytest.raises(ValueError, match=r"guide must have finite parameters, .*locs.trunk.bias'"):
        TermsELBO()(model, guide)(X, Y)
    with pytest.raises(ValueError, match=r"guide must have finite parameters, .*locs.trunk.bias"):
        diagnose(model, guide, (X, Y))
