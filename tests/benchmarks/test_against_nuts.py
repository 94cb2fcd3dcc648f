# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro.poutine as poutine
import pytest
import torch

from benchmarks.guides import against_nuts
from pyro_radial.nn.priors import FanIn


@pytest.mark.parametrize("name", list(against_nuts.NETS))
def test_the_density_that_nuts_samples_is_the_model_s(name):
    data = against_nuts.data_of(against_nuts.NETS[name])
    density, function, number = against_nuts.energy(name, data)
    model = against_nuts.make_model(name, 0)
    prior = FanIn(against_nuts.GAIN)
    joints, energies = [], []
    for seed in range(2):
        weights = torch.randn(number, generator=torch.Generator().manual_seed(seed))
        values, start = {}, 0
        for site, parameter in against_nuts.make_network(name).named_parameters():
            own = weights[start : start + parameter.numel()].reshape(parameter.shape)
            values[site], start = own * prior(site, parameter).scale, start + parameter.numel()
        trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*data)
        torch.testing.assert_close(function(weights, data[0]), trace.nodes["f"]["value"])
        joints.append(trace.log_prob_sum())
        energies.append(density(weights))
    torch.testing.assert_close(joints[0] - joints[1], energies[1] - energies[0], rtol=1e-4, atol=1e-3)
