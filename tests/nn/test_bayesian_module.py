# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a BayesianModule is to Pyro: its sites, its priors, its own tensors, and several draws in one call."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn

from pyro_radial.nn import BayesianModule, priors
from tests.helpers.distributions import Halves
from tests.helpers.networks import Net, call_with, classifier, data, draws_of, mlp, normed_mlp
from tests.helpers.scale_priors import HyperScale, LearnedScale, scale_mixture

NORMAL = dist.Normal(0.0, 1.0)


def trace_of(bnn, *args):
    return poutine.trace(bnn).get_trace(*args)


class TestSites:
    def test_sites_are_the_parameter_names_with_the_parameters_shapes(self):
        net = mlp()
        bnn = BayesianModule(net)
        trace = trace_of(bnn, torch.randn(5, 3))
        assert trace.stochastic_nodes == [name for name, _ in net.named_parameters()] == list(bnn.sample_parameters())
        for name, parameter in net.named_parameters():
            fn = trace.nodes[name]["fn"]
            assert (fn.batch_shape, fn.event_shape) == ((), parameter.shape)

    def test_norm_layers_are_deterministic_by_default(self):
        norms = [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4)]
        bnn = BayesianModule(nn.Sequential(nn.Conv2d(2, 4, 1), *norms, nn.LayerNorm(3), nn.RMSNorm(3)))
        assert bnn.sites == ("0.weight", "0.bias")
        assert {name.split(".")[0] for name, _ in bnn.net.named_parameters()} == {"1", "2", "3", "4", "5"}

    def test_frozen_parameters_are_neither_random_nor_trained_by_default(self):
        net = mlp()
        net[0].requires_grad_(False)
        bnn = BayesianModule(net)
        assert bnn.sites == ("2.weight", "2.bias")
        assert not list(bnn.parameters())
        assert {name for name, _ in bnn.named_buffers()} == {"net.0.weight", "net.0.bias"}
        plain = bnn.to_module(draws_of(bnn))
        assert [p.requires_grad for p in plain.parameters()] == [False, False, True, True]
        torch.testing.assert_close(plain[0].weight, net[0].weight)

    def test_select_by_function(self):
        bnn = BayesianModule(mlp(), select=lambda name, parameter: parameter.dim() == 1)
        assert bnn.sites == ("0.bias", "2.bias")
        assert {name for name, _ in bnn.named_parameters()} == {"net.0.weight", "net.2.weight"}


class TestPriors:
    def test_a_mapping_gives_each_site_its_prior(self):
        prior = {"weight": dist.Normal(3.0, 1e-4), "bias": dist.Normal(torch.tensor([5.0, 6.0]), 1e-4)}
        values = BayesianModule(nn.Linear(3, 2), prior).sample_parameters()
        torch.testing.assert_close(values["weight"], torch.full((2, 3), 3.0), atol=1e-2, rtol=0)
        torch.testing.assert_close(values["bias"], torch.tensor([5.0, 6.0]), atol=1e-2, rtol=0)

    def test_a_distribution_whose_expand_works_in_place_stays_as_it_is(self):
        bnn = BayesianModule(nn.Linear(3, 2), Halves())
        with pyro.plate("draws", 4):
            assert bnn.sample_parameters()["weight"].shape == (4, 2, 3)
        assert bnn.sample_parameters()["weight"].shape == (2, 3)

    @pytest.mark.parametrize(
        "make_prior",
        [
            lambda: dist.Normal(0.0, 1.0),
            lambda: dist.TransformedDistribution(
                dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(torch.tensor(1.0), torch.tensor(2.0))]
            ),
            scale_mixture,
            priors.FanIn,
            LearnedScale,
            HyperScale,
            lambda: {"weight": dist.Normal(0.0, 1.0), "bias": dist.Laplace(torch.zeros(2), 1.0)},
        ],
        ids=["normal", "transformed", "mixture", "fan-in", "learned", "hyper", "mapping"],
    )
    @pytest.mark.parametrize("cast", ["before", "after"])
    def test_the_prior_follows_the_networks_dtype(self, make_prior, cast):
        net, prior = nn.Linear(3, 2), make_prior()
        bnn = BayesianModule(net.double(), prior) if cast == "before" else BayesianModule(net, prior).double()
        trace = trace_of(bnn, torch.randn(5, 3, dtype=torch.float64))
        for name in trace.stochastic_nodes:
            site = trace.nodes[name]
            assert site["value"].dtype == torch.float64
            assert site["fn"].log_prob(site["value"]).dtype == torch.float64
        assert trace.nodes["weight"]["infer"]["initial_value"].dtype == torch.float64
        assert trace.nodes["_RETURN"]["value"].dtype == torch.float64

    @pytest.mark.cuda
    @pytest.mark.parametrize("prior", [dist.Normal(0.0, 1.0), scale_mixture(), HyperScale()])
    def test_the_prior_follows_the_networks_device(self, prior):
        bnn = BayesianModule(normed_mlp(), prior).cuda()
        trace = trace_of(bnn, torch.randn(5, 3, device="cuda"))
        assert all(trace.nodes[name]["value"].is_cuda for name in trace.stochastic_nodes)
        assert trace.nodes["_RETURN"]["value"].is_cuda


class TestTraining:
    @pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
    def test_svi_trains_random_and_deterministic_parts(self, loss):
        model, (x, y) = classifier(), data(40)
        guide = AutoNormal(model)
        guide(x, y)
        layer_norm = dict(model.bnn.net.named_parameters())
        before = {name: value.detach().clone() for name, value in layer_norm.items()}
        locs = {name: value.detach().clone() for name, value in guide.named_parameters()}
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss())
        losses = [svi.step(x, y) for _ in range(30)]
        assert set(before) == {"1.weight", "1.bias"}
        for name, value in model.bnn.net.named_parameters():
            assert not torch.equal(value, before[name])
        assert all(not torch.equal(value, locs[name]) for name, value in guide.named_parameters())
        assert sum(losses[-5:]) < 0.75 * sum(losses[:5])

    def test_a_parameter_with_another_memory_layout_is_trained(self):
        # Pyro's store keeps a copy of a tensor that is not contiguous, and would train that.
        net = nn.Sequential(nn.Conv2d(3, 2, 2), nn.Conv2d(2, 2, 2)).to(memory_format=torch.channels_last)
        bnn = BayesianModule(net, select="^1")
        before = bnn.net.get_submodule("0").weight.detach().clone()

        def model(x):
            with poutine.block(hide_types=["sample"]):
                f = bnn(x)
            pyro.factor("loss", f.sum())

        svi = SVI(model, lambda x: None, pyro.optim.SGD({"lr": 0.1}), Trace_ELBO())
        svi.step(torch.randn(4, 3, 4, 4))
        assert not torch.equal(bnn.net.get_submodule("0").weight, before)

    def test_values_loaded_into_the_store_are_taken_over_and_trained(self):
        bnn, x = BayesianModule(normed_mlp()), torch.randn(5, 3)
        bnn(x)
        key = f"{bnn._pyro_name}.net.1.weight"
        state = pyro.get_param_store().get_state()
        state["params"][key] = torch.full((6,), 3.0, requires_grad=True)
        pyro.clear_param_store()
        pyro.get_param_store().set_state(state)
        trace = trace_of(bnn, x)
        weight = bnn.net.get_submodule("1").weight
        assert torch.equal(weight, torch.full((6,), 3.0))
        assert trace.nodes[key]["value"] is weight
        trace.nodes["_RETURN"]["value"].sum().backward()
        assert weight.grad is not None


class TestDraws:
    @pytest.mark.parametrize(("parallel", "num_samples"), [(False, 6), (True, 1), (True, 6)])
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
        bnn = BayesianModule(Net(lambda net, x: net.layer(x) * pyro.sample("inside", NORMAL), layer=nn.Linear(3, 2)))
        assert trace_of(bnn, torch.randn(5, 3)).stochastic_nodes == ["layer.weight", "layer.bias", "inside"]

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("2.bias", (4, 2), r"'2\.bias' must have draws of shape \(3,\), as site '0\.weight' has, got \(4,\)"),
            *(
                ("0.weight", shape, r"'0\.weight' must have a value whose shape ends in")
                for shape in ((6, 2), (3,), ())
            ),
        ],
    )
    def test_values_of_a_wrong_shape_are_refused(self, name, shape, message):
        bnn = BayesianModule(mlp())
        with pytest.raises(ValueError, match=message):
            call_with(bnn, {**draws_of(bnn, 3), name: torch.zeros(shape)}, torch.randn(5, 3))


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


WIDE = dist.MultivariateNormal(torch.zeros(3), torch.eye(3))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (mlp, {"select": "nothing"}, "select must choose at least one parameter"),
        (mlp, {"select": lambda name, parameter: False}, "select must choose at least one parameter"),
        (mlp, {"select": "("}, "select must be a valid regular expression"),
        (mlp, {"prior": {"0.weight": NORMAL}}, r"prior must have an entry for site '0\.bias'"),
        (lambda: nn.Linear(3, 2), {"prior": dict.fromkeys(("weight", "bias", "wieght"), NORMAL)}, "wieght"),
        (mlp, {"prior": torch.distributions.Normal(0.0, 1.0)}, r"'0\.weight' must be a pyro\.distributions"),
        (mlp, {"prior": lambda name, parameter: 1.0}, r"'0\.weight' must be a pyro\.distributions"),
        (
            mlp,
            {"prior": dist.Normal(torch.zeros(2, 3), 1.0)},
            r"'0\.weight' must have shape .* \(6, 3\), got \(2, 3\) ",
        ),
        (mlp, {"prior": WIDE}, r"'0\.weight' must have shape .* \(6, 3\), got \(3,\) .*event_shape \(3,\)"),
        (lambda: nn.Sequential(PyroModule[nn.Linear](3, 2)), {}, "net must be a plain network"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), {}, r"lazy parameter '0\.weight'"),
    ],
)
def test_bad_arguments_are_named(make, options, message):
    with pytest.raises(ValueError, match=message):
        BayesianModule(make(), **options)


def test_a_prior_cannot_be_set_later():
    bnn = BayesianModule(nn.Linear(2, 1))
    with pytest.raises(AttributeError, match="prior cannot be set"):
        bnn.prior = NORMAL
