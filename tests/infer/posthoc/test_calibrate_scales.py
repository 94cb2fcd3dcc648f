# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scales chosen after training are those that closed forms say, and the search tells no more than it found."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import calibrate_scales
from pyro_radial.infer.posthoc.calibrate_scales import ScaleName
from pyro_radial.nn import likelihoods
from tests.helpers.trained import guide_of, overfitted

NAMES = ScaleName.__args__


def one_weight(num_rows=400, noise=0.3, spread=0.5):
    """Regression with one weight, on rows with more spread than the noise explains."""
    torch.manual_seed(0)
    network = nn.Linear(1, 1, bias=False)
    x = torch.randn(num_rows, 1)
    mean = network.weight.item()
    y = mean * x + (noise**2 + (spread * x) ** 2).sqrt() * torch.randn(num_rows, 1)
    model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(scale=noise))
    guide = guide_of(AutoMeanField, network, model, (x, y))

    def exact_nll(stddev):
        variance = noise**2 + (stddev * x) ** 2
        return float((0.5 * (2 * math.pi * variance).log() + 0.5 * (y - mean * x) ** 2 / variance).mean())

    return model, guide, (x, y), exact_nll


def test_the_scale_of_one_weight_is_the_best_in_closed_form():
    model, guide, rows, exact_nll = one_weight()
    search = calibrate_scales(model, guide, rows, low=0.01, high=10.0, num_refinements=10, num_samples=1000)
    best = minimize_scalar(lambda log: exact_nll(math.exp(log)), bounds=(-4.0, 2.0), method="bounded")
    # The estimate of a scale from 1000 draws has an error of about 1 / sqrt(2000).
    assert search.curve.best == pytest.approx(math.exp(best.x), rel=4.5 / 2000**0.5)
    assert search.nll == pytest.approx(best.fun, abs=0.02)
    assert search.plain_nll == pytest.approx(exact_nll(0.0), rel=1e-5)
    assert float(guide.posterior()["weight"].stddev) == pytest.approx(search.numbers["weight"], rel=1e-5)


def test_the_curve_is_the_nll_at_each_number():
    model, guide, rows, exact_nll = one_weight()
    curve = calibrate_scales(model, guide, rows, low=0.01, high=1.0, num_grid=5, num_samples=1000).curve
    assert torch.equal(curve.numbers, curve.numbers.sort().values)
    for number, nll, error in zip(curve.numbers, curve.nll, curve.standard_error, strict=True):
        assert float(nll) == pytest.approx(exact_nll(float(number)), abs=0.05)
        assert 0 < float(error) < 0.2 * float(nll) + 0.2
    assert not curve.at_end


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField])
@pytest.mark.parametrize("scales", NAMES)
def test_every_strategy_beats_the_network_without_noise(make, scales):
    network, model, data, validation = overfitted()
    guide = guide_of(make, network, model, data)
    own = {"data": data} if scales in ("activations", "curvature") else {}
    search = calibrate_scales(model, guide, validation, scales, **own)
    assert search.nll < search.plain_nll - 0.02
    assert search.nll == float(search.curve.nll.min())
    assert set(search.numbers.values()) == {search.curve.best}
    assert all(torch.equal(guide.median()[name], value) for name, value in network.state_dict().items())
    # A new draw finds the same, up to the noise of 16 draws.
    draws = predict(model, guide, validation[0], num_samples=200)
    assert -float(draws.log_prob(validation[1]).mean()) < search.plain_nll


def test_a_number_for_each_site_is_never_worse():
    network, model, data, validation = overfitted()
    guide = guide_of(AutoRadial, network, model, data)
    one = calibrate_scales(model, guide, validation)
    several = calibrate_scales(model, guide, validation, site_sweeps=2)
    assert several.nll < one.nll
    assert len(set(several.numbers.values())) > 1
    assert several.site_curves.keys() == several.numbers.keys() == dict(network.named_parameters()).keys()
    for name, value in several.numbers.items():
        assert float(guide.posterior()[name].stddev.mean()) == pytest.approx(value, rel=1e-4)
        assert several.site_curves[name].best == value
    assert (one.evaluations, several.evaluations) == (1 + 16 + 6 + 1, 1 + 16 + 6 + 1 + 2 * 4 * (5 + 3))


def test_the_search_repeats_itself_and_leaves_random_numbers_and_modes_alone():
    network, model, data, validation = overfitted()
    guide = guide_of(AutoRadial, network, model, data)
    model.train()
    state = torch.get_rng_state()
    first, second = (calibrate_scales(model, guide, validation, "norm") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert torch.equal(first.curve.nll, second.curve.nll)
    other = calibrate_scales(model, guide, validation, "norm", seed=1)
    assert not torch.equal(first.curve.nll, other.curve.nll)


def test_a_function_gives_relative_scales():
    network, model, data, validation = overfitted()
    guide = guide_of(AutoMeanField, network, model, data)
    search = calibrate_scales(model, guide, validation, lambda name, mean: 1e-6 if "bias" in name else mean.abs() + 0.1)
    posterior = guide.posterior()
    expected = search.curve.best * (network[0].weight.abs() + 0.1)
    torch.testing.assert_close(posterior["0.weight"].stddev, expected.detach(), rtol=1e-4, atol=0.0)
    assert float(posterior["0.bias"].stddev.max()) == pytest.approx(1e-6 * search.curve.best, rel=1e-3)


def test_a_search_that_would_go_on_says_so():
    model, guide, rows, _ = one_weight()
    assert calibrate_scales(model, guide, rows, low=1e-4, high=1e-2).curve.at_end


def test_what_fails_leaves_the_scales_as_they_were():
    network, model, data, validation = overfitted(steps=1)
    guide = guide_of(AutoRadial, network, model, data)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    with pytest.raises(ValueError, match=r"scales must be positive and finite, got others at site '0.bias'"):
        calibrate_scales(model, guide, validation, lambda name, mean: 1.0 if "weight" in name else -1.0)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": "he"}, r"scales must be a function or one of .*'radius'.*, got 'he'"),
        ({"scales": "curvature"}, "data must be training rows for scales='curvature', got none"),
        ({"scales": "norm", "data": 1}, "data must be left out for scales='norm'"),
        ({"low": 0.0}, "low must be a positive finite number, got 0.0"),
        ({"low": 2.0, "high": 1.0}, "high must be larger than low, got 1.0 and 2.0"),
        ({"num_grid": 2}, "num_grid must be at least 3, got 2"),
        ({"num_refinements": -1}, "num_refinements must be a non-negative integer, got -1"),
        ({"site_sweeps": -1}, "site_sweeps must be a non-negative integer, got -1"),
        ({"num_samples": 0}, "num_samples must be a positive integer, got 0"),
    ],
)
def test_bad_input_is_named(options, message):
    network, model, data, validation = overfitted(steps=1)
    guide = guide_of(AutoRadial, network, model, data)
    with pytest.raises(ValueError, match=message):
        calibrate_scales(model, guide, validation, **options)
