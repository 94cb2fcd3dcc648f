# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plain networks taken from a BayesianModule, its state and its copies."""

import copy
import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn

from pyro_radial.nn import BayesianModule
from tests.helpers.networks import call_with, classifier, data, draws_of, mlp, normed_mlp


class TestToModule:
    def test_it_is_a_plain_network_of_the_same_kind(self):
        net = normed_mlp().eval()
        bnn = BayesianModule(net)
        plain = bnn.to_module(draws_of(bnn))
        assert [type(module) for module in plain.modules()] == [type(module) for module in net.modules()]
        assert not any(isinstance(module, PyroModule) for module in plain.modules())
        assert plain.state_dict().keys() == net.state_dict().keys()
        assert all(p.requires_grad and p.is_leaf and p.device.type == "cpu" for p in plain.parameters())
        assert not plain.training

    def test_draws_of_a_guide_and_its_median_are_accepted(self):
        model, (x, y) = classifier(), data()
        guide = AutoNormal(model)
        for draw in (guide(x, y), guide.median()):
            plain = model.bnn.to_module(draw)
            torch.testing.assert_close(plain(x), call_with(model.bnn, draw, x))

    def test_it_makes_no_site_in_a_model_around_it(self):
        bnn = BayesianModule(normed_mlp())
        draw = draws_of(bnn)
        trace = poutine.trace(lambda: bnn.to_module(draw)).get_trace()
        assert not trace.stochastic_nodes
        assert not trace.param_nodes

    def test_a_prior_with_sites_of_its_own_is_resolved(self):
        class Signed:
            def sample_parameter(self, name, parameter):
                # A plate makes a site of its own, which is nothing that a draw must hold.
                with pyro.plate(f"{name}.columns", parameter.shape[-1]):
                    size = pyro.sample(f"{name}.size", dist.HalfNormal(1.0).expand(parameter.shape))
                return pyro.deterministic(name, -size, event_dim=parameter.dim())

        bnn = BayesianModule(nn.Linear(3, 2, bias=False), Signed())
        draw = {"weight.size": torch.rand(2, 3)}
        plain = bnn.to_module(draw)
        assert torch.equal(plain.weight, -draw["weight.size"])
        with pytest.raises(ValueError, match=r"'weight\.size', which 'weight' needs"):
            bnn.to_module({})

    @pytest.mark.parametrize("lead", [(4,), (1, 2), (3, 2)])
    def test_several_draws_are_refused(self, lead):
        bnn = BayesianModule(mlp())
        with pytest.raises(ValueError, match=r"one value of site '0\.weight'"):
            bnn.to_module(draws_of(bnn, *lead))


class TestState:
    def make(self):
        return BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def test_the_state_dict_names_follow_the_network(self):
        assert set(self.make().state_dict()) == {
            "net.1.weight",
            "net.1.bias",
            "net.1.running_mean",
            "net.1.running_var",
            "net.1.num_batches_tracked",
        }

    def test_the_state_dict_round_trip_reads_weights_only(self):
        bnn, file = self.make(), io.BytesIO()
        bnn(torch.randn(8, 3) + 2)
        with torch.no_grad():
            bnn.net.get_submodule("1").weight.normal_()
        torch.save(bnn.state_dict(), file)
        file.seek(0)
        other = self.make()
        other.load_state_dict(torch.load(file, weights_only=True))
        draw, x = draws_of(bnn), torch.randn(5, 3)
        torch.testing.assert_close(call_with(other.eval(), draw, x), call_with(bnn.eval(), draw, x))

    def test_a_deepcopy_is_independent(self):
        bnn, x = self.make(), torch.randn(8, 3)
        bnn(x)
        twin = copy.deepcopy(bnn)
        draw = draws_of(bnn)
        with torch.no_grad():
            twin.net.get_submodule("1").weight.fill_(7.0)
        before = {name: value.clone() for name, value in bnn.state_dict().items()}
        twin(x + 5)
        twin.eval()
        assert bnn._functional.skeleton.training
        assert (twin.net.get_submodule("1").weight == 7.0).all()
        for name, value in bnn.state_dict().items():
            assert torch.equal(value, before[name])
        assert not torch.allclose(call_with(bnn.eval(), draw, x), call_with(twin, draw, x))

    def test_train_and_eval_reach_the_computation(self):
        bnn = BayesianModule(nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)).eval())
        draw, x = draws_of(bnn), torch.randn(5, 3)
        assert not bnn.training
        assert (call_with(bnn, draw, x) != 0).all()
        assert (call_with(bnn.train(), draw, x) == 0).any()
        assert (call_with(bnn.eval(), draw, x) != 0).all()


@pytest.mark.parametrize("draws", [(), (3,)], ids=["one draw", "three draws"])
def test_a_module_with_two_names_leaves_nothing_of_a_call_behind(draws):
    shared = nn.Linear(3, 3)
    bnn = BayesianModule(nn.Sequential(shared, nn.Tanh(), shared))
    before = dict(bnn.skeleton.named_parameters())
    with pyro.plate_stack("draws", draws):
        bnn(torch.zeros(2, 3))
    assert all(parameter is before[name] for name, parameter in bnn.skeleton.named_parameters())
    copy.deepcopy(bnn)
