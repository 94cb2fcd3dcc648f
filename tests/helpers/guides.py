# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Test cases of what all our guides share, whatever their families are."""

import copy
import io

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList
from pyro.optim import PyroOptim

from pyro_radial.testing import GuideTests
from pyro_radial.testing.guides import constrained_model, local_model, train, weights_model


class OwnGuideTests(GuideTests):
    """Check plates, lists of guides, predictions, copies and refusals too."""

    def test_replaying_a_draw_gives_the_model_that_draw(self, guide, data):
        guide_trace = poutine.trace(guide).get_trace(*data)
        replayed = poutine.trace(poutine.replay(weights_model, trace=guide_trace)).get_trace(*data)
        drawn = guide_trace.nodes["layer.weight"]
        replayed_site = replayed.nodes["layer.weight"]
        assert torch.equal(replayed_site["value"], drawn["value"])

    def test_create_plates_chooses_the_rows(self):
        data = torch.randn(7, 2)
        rows = torch.tensor([1, 4])

        def plates(data, batch=None):
            return pyro.plate("rows", len(data), subsample=rows)

        guide = self.make(local_model, create_plates=plates)
        guide(data, 2)
        with torch.no_grad():
            guide_trace = poutine.trace(guide).get_trace(data, 2)
        assert guide_trace.nodes["local"]["value"].shape == (2, 2)
        assert torch.equal(guide_trace.nodes["rows"]["value"], rows)

    def test_it_joins_an_autoguidelist(self, data):
        guide = AutoGuideList(weights_model)
        guide.append(self.make(poutine.block(weights_model, hide=["noise"])))
        guide.append(AutoDelta(poutine.block(weights_model, expose=["noise"])))
        assert set(guide(*data)) == {"layer.weight", "layer.bias", "noise"}
        assert set(guide.median(*data)) == {"layer.weight", "layer.bias", "noise"}
        svi = SVI(weights_model, guide, PyroOptim(torch.optim.Adam, {"lr": 0.01}), Trace_ELBO())
        assert svi.step(*data) > 0

    @pytest.mark.parametrize("parallel", [False, True])
    def test_predictive_draws_from_the_guide(self, parallel, guide, data):
        x = data[0]
        draws = Predictive(weights_model, guide=guide, num_samples=5, parallel=parallel)(x)
        assert draws["y"].shape == (5, 6, 2)
        latent = Predictive(guide, num_samples=5, parallel=parallel)(x)
        assert latent["layer.weight"].shape == (5, 2, 3)

    def test_setup_makes_the_parameters_without_training(self, data):
        guide = self.make(weights_model)
        assert not list(guide.parameters())
        guide.setup(*data)
        names = [name for name, _ in guide.named_parameters()]
        assert names
        guide.setup(*data)
        assert [name for name, _ in guide.named_parameters()] == names

    def test_loading_into_a_guide_without_parameters_says_to_set_it_up(self, guide):
        with pytest.raises(RuntimeError, match="setup"):
            self.make(weights_model).load_state_dict(guide.state_dict())

    @pytest.mark.parametrize("called_before", [False, True])
    def test_copying_and_saving_leave_the_original_usable(self, called_before, data):
        guide = self.make(weights_model)
        if called_before:
            guide(*data)
        twin = copy.deepcopy(guide)
        torch.save(guide, io.BytesIO())
        assert set(guide(*data)) == set(twin(*data))

    def test_a_copy_trains_on_its_own(self, guide, data):
        twin = copy.deepcopy(guide)
        medians = {name: value.clone() for name, value in guide.median().items()}
        train(weights_model, twin, *data)
        guide(*data)
        assert all(torch.equal(guide.median()[name], medians[name]) for name in medians)
        assert not torch.equal(twin.median()["layer.weight"], medians["layer.weight"])

    def test_two_guides_of_one_class_do_not_train_each_other(self, guide, data):
        second = self.make(weights_model)
        second(*data)
        bias = second.median()["layer.bias"].clone()
        train(weights_model, guide, *data)
        second(*data)
        assert torch.equal(second.median()["layer.bias"], bias)

    def test_a_loss_at_the_median_is_finite_and_silent(self, guide, data):
        at_median = poutine.condition(guide, data=guide.median())
        trace = poutine.trace(at_median).get_trace(*data)
        trace.compute_log_prob()
        assert bool(torch.isfinite(torch.as_tensor(trace.log_prob_sum()).detach()))

    def test_quantiles_of_a_site_that_mixes_elements_are_refused_by_name(self):
        if not self.has_quantiles:
            pytest.skip("the guide has no quantiles")
        guide = self.make(constrained_model)
        guide()
        with pytest.raises(ValueError, match="mixture"):
            guide.quantiles([0.5])

    def test_a_discrete_latent_site_is_refused_by_name(self):
        def model():
            pyro.sample("coin", dist.Bernoulli(0.5))

        with pytest.raises(ValueError, match="coin"):
            self.make(model)()

    def test_state_dict_round_trip_is_exact_and_loads_weights_only(self, guide, data):
        twin_guide = self.make(weights_model)
        twin_guide.setup(*data)
        buffer = io.BytesIO()
        torch.save(guide.state_dict(), buffer)
        buffer.seek(0)
        twin_guide.load_state_dict(torch.load(buffer, weights_only=True))
        pyro.set_rng_seed(3)
        draw = guide(*data)
        pyro.set_rng_seed(3)
        twin = twin_guide(*data)
        assert all(torch.equal(draw[name], twin[name]) for name in draw)
