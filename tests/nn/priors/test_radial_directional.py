# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Directions and radii as the prior of weight tensors."""

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from scipy import stats
from torch import nn
from torch.distributions import kl_divergence

from pyro_radial import AutoRadialDirectional, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.nn.priors.radial_directional import TensorSites

GROUPINGS = ("row", "column", "double")


def conv_net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2)
    )


def model_of(net, prior):
    return SupervisedModel(BayesianModule(net, prior), likelihoods.Categorical(num_data=20))


class TestSites:
    @pytest.mark.parametrize(("grouping", "prefix", "shape"), [("row", "w", (3, 50)), ("column", "w.column", (2, 75))])
    def test_a_group_is_an_output_or_an_input_with_all_kernel_positions(self, grouping, prefix, shape):
        weight, joint = torch.randn(3, 2, 5, 5), "_" if grouping == "column" else "."
        nodes = poutine.trace(RadialDirectionalPrior(grouping).sample_parameter).get_trace("w", weight).nodes
        value = nodes["_RETURN"]["value"]
        assert (nodes[f"{prefix}{joint}direction"]["value"].shape, value.shape) == (shape, weight.shape)
        groups = (value if grouping == "row" else value.transpose(0, 1)).flatten(1)
        radius = nodes[f"{prefix}{joint}local_radius"]["value"] * nodes["w.global_radius"]["value"]
        torch.testing.assert_close(groups.norm(dim=1), radius)

    def test_radii_are_half_cauchy_and_directions_uniform(self):
        weight = torch.randn(5_000, 3)
        prior = RadialDirectionalPrior("row", global_scale=0.01)
        trace = poutine.trace(prior.sample_parameter).get_trace("w", weight)
        radius, direction = (trace.nodes[f"w.{part}"]["value"] for part in ("local_radius", "direction"))
        assert stats.kstest(radius.numpy(), "halfcauchy").pvalue > 0.001
        assert stats.kstest(direction[:, 0].numpy(), stats.uniform(-1, 2).cdf).pvalue > 0.001
        draws = [
            poutine.trace(prior.sample_parameter).get_trace("v", weight[:1]).nodes["v.global_radius"]["value"]
            for _ in range(200)
        ]
        assert stats.kstest(torch.stack(draws).numpy() / 0.01, "halfcauchy").pvalue > 0.001

    def test_a_group_of_one_element_has_a_normal_in_place_of_a_direction(self):
        trace = poutine.trace(RadialDirectionalPrior("row").sample_parameter).get_trace("w", torch.randn(4, 1))
        assert isinstance(trace.nodes["w.direction"]["fn"].base_dist, dist.Normal)
        assert trace.nodes["_RETURN"]["value"].shape == (4, 1)

    def test_vectors_are_normal_and_so_is_what_a_mapping_leaves_out(self):
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        bnn = BayesianModule(net, RadialDirectionalPrior({"0.weight": "row"}, bias_scale=0.3))
        nodes = poutine.trace(bnn).get_trace(torch.zeros(1, 3)).nodes
        assert nodes["0.bias"]["fn"].base_dist.scale.unique() == torch.tensor(0.3)
        assert nodes["1.weight"]["fn"].base_dist.scale.unique() == torch.tensor(0.5)
        assert "1.weight.direction" not in nodes


class TestUnderAGuide:
    @pytest.mark.parametrize("grouping", GROUPINGS)
    @pytest.mark.parametrize("shared", [True, False])
    def test_it_starts_at_the_networks_weights_and_every_kl_is_analytic_and_never_negative(self, grouping, shared):
        net, inputs = conv_net(), (torch.randn(4, 2, 6, 6), torch.tensor([0, 1, 1, 0]))
        model = model_of(net, RadialDirectionalPrior(grouping, global_scale=1e-3))
        guide = AutoRadialDirectional(model, shared_concentration=shared)
        guide.setup(*inputs)
        plain = model.bnn.to_module(guide.median())
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(plain.get_parameter(name), parameter, rtol=2e-5, atol=1e-7)
        elbo = TermsELBO(strict_kl=True)
        elbo(model, guide)(*inputs).backward()
        assert all(float(kl) >= 0 for kl in elbo.terms.kl_by_site.values())
        gradients = [parameter.grad for parameter in guide.parameters()]
        assert all(g is not None and bool(g.isfinite().all()) for g in gradients)

    def test_the_global_radius_of_a_tensor_counts_once(self):
        model = model_of(nn.Linear(3, 4), RadialDirectionalPrior("double", global_scale=0.2))
        guide = AutoRadialDirectional(model)
        elbo = TermsELBO(strict_kl=True)
        elbo(model, guide)(torch.zeros(2, 3), torch.tensor([0, 1]))
        posterior = guide.posterior()["weight.global_radius_gamma"]
        expected = kl_divergence(posterior, dist.Gamma(0.5, 1 / 0.2**2))
        torch.testing.assert_close(elbo.terms.kl_by_site["weight.global_radius_gamma"], expected, rtol=1e-5, atol=1e-5)


class TestBadInput:
    @pytest.mark.parametrize("grouping", ["rows", {"0.weight": "rows"}])
    def test_an_unknown_grouping_is_named(self, grouping):
        with pytest.raises(ValueError, match="grouping must be one of"):
            RadialDirectionalPrior(grouping)

    @pytest.mark.parametrize("unknown", ["zzz", "bias.", "0.weight"])
    def test_a_grouping_of_an_unknown_parameter_is_named(self, unknown):
        words = rf"grouping must name random parameters, which are \['weight', 'bias'\], got \['{unknown}'\]"
        with pytest.raises(ValueError, match=words):
            BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior({"weight": "row", unknown: "row"}))

    def test_a_bias_cannot_be_grouped_by_name(self):
        bnn = BayesianModule(nn.Linear(3, 4), RadialDirectionalPrior({"bias": "row"}))
        with pytest.raises(ValueError, match=r"'bias' must have rows and columns"):
            bnn(torch.zeros(1, 3))


def test_the_parameter_is_found_by_the_gamma_factor_of_its_global_radius():
    sites = TensorSites("0.weight")
    assert TensorSites.with_global_radius(sites.global_radius.gamma) == sites
    local = sites.local_radius("row")
    for other in ("0.weight", sites.global_radius.radius, sites.global_radius.inverse_gamma, local.gamma):
        assert TensorSites.with_global_radius(other) is None
