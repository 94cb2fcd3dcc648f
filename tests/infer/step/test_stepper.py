# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss that is not finite stops the optimizer, at once or at the next look, and is named."""

from functools import partial

import pyro
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO

from pyro_radial import AutoRadial, CompiledSVI, TermsELBO
from tests.helpers.networks import classifier, data, mlp

X, Y = data(8)
NONFINITE = X.clone()
NONFINITE[0, 0] = torch.nan


def steps(optim, loss=None, **settings):
    model = classifier(net=mlp())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return CompiledSVI(model, guide, optim, loss or TermsELBO(), compile=False, **settings)


def values(svi):
    return {name: value.detach().clone() for name, value in svi.guide.named_parameters()}


def assert_equal(one, other):
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_first_loss_that_is_not_finite_is_named_and_no_step_is_taken():
    svi = steps(partial(torch.optim.Adam, lr=0.01))
    svi.step(X, Y)
    expected = values(svi)
    with pytest.raises(FloatingPointError, match=r"in step 1: log-likelihood of site 'y'.*no step was taken"):
        svi.step(NONFINITE, Y)
    assert_equal(expected, values(svi))
    with torch.no_grad():
        next(iter(svi.guide.parameters())).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"not finite in step 1: parameter .*locs"):
        svi.step(X, Y)


@pytest.mark.parametrize("make_loss", [TermsELBO, TraceMeanField_ELBO])
def test_a_loss_that_is_looked_at_later_stops_a_fused_optimizer_at_once(make_loss):
    svi = steps(pyro.optim.Adam({"lr": 0.01}), make_loss(), check_every=5)
    for _ in range(2):
        svi.step(X, Y)
    expected = values(svi)
    svi.step(NONFINITE, Y)
    svi.step(X, Y)
    assert_equal(expected, values(svi))
    with pytest.raises(FloatingPointError, match=r"not finite in step 2: log-.* of site 'y'"):
        svi.step(X, Y)
    assert_equal(expected, values(svi))
    svi.step(X, Y)
    assert not torch.equal(next(iter(expected.values())), next(iter(values(svi).values())))


def test_an_optimizer_that_cannot_stand_still_is_looked_after_at_each_step():
    svi = steps(partial(torch.optim.Rprop, lr=0.01), check_every=5)
    svi.step(X, Y)
    expected = values(svi)
    with pytest.raises(FloatingPointError, match="log-likelihood of site 'y'"):
        svi.step(NONFINITE, Y)
    assert_equal(expected, values(svi))
