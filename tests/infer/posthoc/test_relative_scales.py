# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Relative scales are what their formulas say: against sampling, closed forms and brute force."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.posthoc.relative_scales import (
    activation_scales,
    constant,
    curvature_scales,
    norm,
    radius,
    singular_values,
)
from pyro_radial.nn import likelihoods
from tests.helpers.trained import guide_of, overfitted


def test_scales_of_the_weights_alone():
    mean = torch.tensor([[3.0, 0.0, 0.0], [0.0, -4.0, 0.0]])
    assert constant("w", mean) == 1.0
    assert radius("w", mean) == pytest.approx(6**-0.5)
    assert float(norm("w", mean)) == pytest.approx((25 / 6) ** 0.5)
    assert float(singular_values("w", mean)) == pytest.approx(4 / (2**0.5 + 3**0.5))
    assert float(singular_values("b", torch.tensor([3.0, 4.0]))) == pytest.approx(5 / (2**0.5 + 1))
    assert float(singular_values("k", mean.reshape(2, 3, 1, 1))) == float(singular_values("w", mean))


@pytest.mark.parametrize("scale", [norm, singular_values])
def test_weights_of_zero_have_a_positive_scale(scale):
    assert float(scale("b", torch.zeros(3))) > 0


def test_unit_noise_has_about_the_largest_singular_value_that_it_is_divided_by():
    largest = torch.linalg.matrix_norm(torch.randn(200, 60, 40), ord=2).mean()
    assert float(largest) <= 60**0.5 + 40**0.5
    assert float(largest) == pytest.approx(60**0.5 + 40**0.5, rel=0.05)


def test_the_noise_of_every_layer_is_one_at_its_outputs():
    network, model, data, _ = overfitted()
    scales = activation_scales(model, guide_of(AutoMeanField, network, model, data), data)
    x = data[0]
    hidden = network[1](network[0](x)).detach()
    for name, a in (("0.weight", x), ("2.weight", hidden)):
        weight = network.get_parameter(name)
        assert scales("0.bias", network[0].bias) == 1.0
        # The noise of an output is normal with variance scale^2 |a|^2 in each row.
        variance = (float(scales(name, weight)) ** 2 * a.square().sum(1)).mean()
        assert float(variance) == pytest.approx(1.0, rel=1e-5)


def test_the_noise_of_a_convolution_is_one_at_its_outputs():
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    x = torch.randn(500, 2, 6, 6)
    guide = guide_of(AutoMeanField, network, model, (x[:2], torch.tensor([0, 1])))
    scale = float(activation_scales(model, guide, (x, torch.zeros(500).long()))("0.weight", network[0].weight))
    noise = nn.functional.conv2d(x, scale * torch.randn(400, 2, 3, 3))
    assert float(noise.square().mean()) == pytest.approx(1.0, rel=0.05)


def test_curvature_of_linear_regression_is_the_posterior_precision():
    torch.manual_seed(1)
    x = torch.randn(4000, 3) * torch.tensor([0.5, 1.0, 2.0])
    network = nn.Linear(3, 1, bias=False)
    likelihood = likelihoods.Gaussian(scale=0.5)
    model = SupervisedModel(BayesianModule(network, prior=dist.Normal(0.0, 0.1)), likelihood)
    guide = guide_of(AutoMeanField, network, model, (x, x[:, :1]))
    found = curvature_scales(model, guide, (x, x[:, :1]), max_rows=4000)("weight", network.weight)
    exact = (x.square().sum(0) / 0.5**2 + 1 / 0.1**2).rsqrt()
    # A squared gradient has a relative error of about sqrt(8 / 4000), half of which the root leaves.
    torch.testing.assert_close(found[0], exact, rtol=0.5 * 4.5 * (8 / 4000) ** 0.5, atol=0.0)


def test_curvature_of_a_classifier_is_the_diagonal_of_gauss_and_newton():
    network, model, data, _ = overfitted(steps=20)
    many = (data[0].repeat(60, 1), data[1].repeat(60))
    guide = guide_of(AutoMeanField, network, model, data)
    scales = curvature_scales(model, guide, many, max_rows=3600, prior_precision=2.0)
    exact = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    for row in data[0]:
        log_probs = network(row).log_softmax(-1)
        for k in range(3):
            gradients = torch.autograd.grad(log_probs[k], network.parameters(), retain_graph=True)
            for total, gradient in zip(exact.values(), gradients, strict=True):
                total += 60 * log_probs[k].exp().detach() * gradient.square()
    for name, value in network.named_parameters():
        h = scales(name, value).pow(-2) - 2.0
        assert float((h - exact[name]).norm() / exact[name].norm()) < 0.1
        # Half the rows stand for all of them.
        half = curvature_scales(model, guide, many, max_rows=1800, prior_precision=2.0)(name, value).pow(-2) - 2.0
        assert float((half - exact[name]).norm() / exact[name].norm()) < 0.15


def test_the_precision_is_that_of_the_prior_unless_given():
    network, _, data, _ = overfitted(steps=1)
    model = SupervisedModel(BayesianModule(network, prior=dist.Normal(0.0, 0.5)), likelihoods.Categorical())
    guide = guide_of(AutoRadial, network, model, data)
    weight = network[2].weight
    by_prior, by_hand = (curvature_scales(model, guide, data, **o) for o in ({}, {"prior_precision": 4.0}))
    torch.testing.assert_close(by_prior("2.weight", weight), by_hand("2.weight", weight))


def test_a_recurrent_network_has_curvatures_too():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.cell(x)[0][:, -1])

    network, x = Last(), torch.randn(4, 5, 2)
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    guide = guide_of(AutoMeanField, network, model, (x, torch.tensor([0, 1, 0, 1])))
    scales = curvature_scales(model, guide, (x, torch.tensor([0, 1, 0, 1])))
    assert 0 < float(scales("cell.weight_ih_l0", network.cell.weight_ih_l0).min()) <= 1
    with pytest.raises(ValueError, match=r"site 'cell.weight_ih_l0' must be the weight or bias of a linear or"):
        activation_scales(model, guide, (x, torch.tensor([0, 1, 0, 1])))("cell.weight_ih_l0", x)


def test_bad_input_is_named():
    network, model, data, _ = overfitted(steps=1)
    guide = guide_of(AutoMeanField, network, model, data)
    with pytest.raises(ValueError, match="curvature_scales: max_rows must be a positive integer, got 0"):
        curvature_scales(model, guide, data, max_rows=0)
    with pytest.raises(ValueError, match=r"site 'other' must be a parameter of the network"):
        curvature_scales(model, guide, data)("other", network[0].bias)
    with pytest.raises(ValueError, match="curvature_scales: prior_precision must be a positive"):
        curvature_scales(model, guide, data, prior_precision=-1.0)
    with pytest.raises(ValueError, match="model must have a likelihood, got BayesianModule without one"):
        activation_scales(model.bnn, guide, data)
