# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which values the host may read while a graph is recorded."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoMeanField, TermsELBO
from tests.helpers.programs import Graphed, assert_same_steps, eager_svi, of_model, prepared, recorded_svi, take_steps

X = torch.linspace(-1.0, 1.0, 8)


def of_scale(x, scale):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w / scale, 1.0), obs=x)


def test_a_tensor_whose_value_is_read_is_compared():
    temperature = torch.tensor(2.0)

    def make():
        temperature.fill_(2.0)
        return of_model(lambda x: of_scale(x, temperature.item()), AutoMeanField, X)

    outcomes = []
    for make_svi in (eager_svi, recorded_svi):
        program = prepared(make)
        svi = make_svi(program)
        outcomes.append([])
        for value in (2.0, 3.0, 2.0):
            temperature.fill_(value)
            outcomes[-1] += take_steps(svi, program, 1)
    assert_same_steps(*reversed(outcomes))
    assert svi.num_graphs == 2
    temperature.fill_(torch.nan)
    loss = Graphed(program.model, program.guide, TermsELBO(), compile=False)
    with pyro.validation_enabled(False):
        assert all(torch.isnan(loss((X,))[0]) for _ in range(2))
    assert loss.replayed


def new_one(scale):
    return scale.new_ones(())


@pytest.mark.parametrize("make_like", [new_one, torch.ones_like])
def test_a_constant_of_the_shape_of_a_draw_may_be_read(make_like):
    def model(x):
        scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        of_scale(x, scale if make_like(scale) == 1.0 else 9.0)

    program = of_model(model, AutoMeanField, X)
    svi = recorded_svi(program)
    take_steps(svi, program, 2)
    assert svi.num_graphs == 1


def test_integer_indices_are_no_shapes_that_depend_on_values():
    def model(x, rows):
        of_scale(x[rows], 1.0)

    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    loss((X, torch.tensor([0, 1])))
    pyro.set_rng_seed(0)
    replayed, _ = loss((X, torch.tensor([5, 6])))
    pyro.set_rng_seed(0)
    expected = TermsELBO()(model, loss.guide)(X, torch.tensor([5, 6]))
    torch.testing.assert_close(replayed, expected.detach())
    assert len(loss.programs) == 1
