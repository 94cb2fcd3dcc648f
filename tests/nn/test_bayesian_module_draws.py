# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Several draws in one call: particles, Predictive, hand-written models."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Predictive, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial.nn import BayesianModule
from tests.helpers.networks import call_with, classifier, data, draws_of, mlp


def trace_of(bnn, *args):
    return poutine.trace(bnn).get_trace(*args)


class TestDraws:
    def test_vectorized_particles_have_the_density_of_each_particle_alone(self):
        model, (x, y) = classifier(), data(10)
        guide = AutoNormal(model, init_scale=0.3)
        elbo = TraceMeanField_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1)
        together, _ = next(elbo._get_traces(model, guide, (x, y), {}))
        alone = torch.zeros(())
        for index in range(3):
            draw = {site: together.nodes[site]["value"][index, 0] for site in model.bnn.sites}
            alone = alone + poutine.trace(poutine.condition(model, data=draw)).get_trace(x, y).log_prob_sum()
        torch.testing.assert_close(together.log_prob_sum(), alone, rtol=1e-5, atol=1e-3)

    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("num_samples", [1, 6])
    def test_predictive_gives_draws_of_the_function(self, parallel, num_samples):
        model, (x, y) = classifier(), data(10)
        guide = AutoNormal(model, init_scale=0.3)
        guide(x, y)
        new = torch.randn(50, 3)
        predictive = Predictive(model, guide=guide, num_samples=num_samples, parallel=parallel)
        draws = predictive(new)
        assert draws["f"].shape == (num_samples, 50, 2)
        assert draws["y"].shape == (num_samples, 50)
        for index in range(num_samples):
            plain = model.bnn.to_module({site: draws[site][index] for site in model.bnn.sites})
            torch.testing.assert_close(draws["f"][index], plain(new), atol=1e-5, rtol=1e-4)

    def test_the_weights_are_sampled_before_the_network_runs(self):
        class WithSite(nn.Linear):
            def forward(self, x):
                pyro.sample("inside", dist.Normal(0.0, 1.0))
                return super().forward(x)

        trace = trace_of(BayesianModule(WithSite(3, 2)), torch.randn(5, 3))
        assert trace.stochastic_nodes == ["weight", "bias", "inside"]

    def test_sites_whose_draws_differ_are_refused(self):
        bnn = BayesianModule(mlp())
        draws = {**draws_of(bnn, 3), "2.bias": torch.zeros(4, 2)}
        with pytest.raises(
            ValueError, match=r"'2\.bias' must have draws of shape \(3,\), as site '0\.weight' has, got \(4,\)"
        ):
            call_with(bnn, draws, torch.randn(5, 3))

    @pytest.mark.parametrize("shape", [(6, 2), (3,), ()])
    def test_a_value_of_a_wrong_shape_is_refused(self, shape):
        bnn = BayesianModule(mlp())
        with pytest.raises(ValueError, match=r"'0\.weight' must have a value whose shape ends in"):
            call_with(bnn, {**draws_of(bnn), "0.weight": torch.zeros(shape)}, torch.randn(5, 3))
