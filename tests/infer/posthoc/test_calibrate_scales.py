# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scales chosen after training are those that closed forms say, and the search tells no more than it found."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.infer import calibrate_scales
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.infer.posthoc import calibrate_scales as module
from pyro_radial.infer.posthoc.calibrate_scales import _golden_section
from pyro_radial.nn import likelihoods
from tests.helpers.trained import guide_of, labels, overfitted


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


def norm(name, mean):
    return mean.square().mean().sqrt()


def test_the_scale_of_one_weight_and_the_nll_of_each_number_tried_are_those_of_the_closed_form():
    model, guide, rows, exact_nll = one_weight(250)
    search = calibrate_scales(model, guide, rows, low=0.1, high=1.0, num_samples=500)
    best = minimize_scalar(lambda log: exact_nll(math.exp(log)), bounds=(-4.0, 2.0), method="bounded")
    # The estimate of a scale from 500 draws has an error of about 1 / sqrt(1000); that of the search is smaller.
    assert search.number == pytest.approx(math.exp(best.x), rel=4.5 / 1000**0.5)
    assert search.nll == pytest.approx(best.fun, abs=0.02)
    assert search.plain_nll == pytest.approx(exact_nll(0.0), rel=1e-5)
    assert float(guide.posterior()["weight"].stddev) == pytest.approx(search.number, rel=1e-5)
    assert list(search.tried) == sorted(search.tried)
    assert len(search.tried) == 22
    for number, nll in search.tried.items():
        assert nll == pytest.approx(exact_nll(number), abs=0.05)
    assert min(search.tried) < search.number < max(search.tried)


@pytest.mark.parametrize("make", [AutoRadial, AutoMeanField])
@pytest.mark.parametrize("scales", [None, norm])
def test_scales_beat_the_network_without_noise(make, scales):
    network, model, data, validation = overfitted()
    guide = guide_of(make, network, model, data)
    search = calibrate_scales(model, guide, validation, scales)
    assert search.nll < search.plain_nll - 0.02
    assert search.nll == min(search.tried.values()) == search.tried[search.number]
    assert all(torch.equal(guide.median()[name], value) for name, value in network.state_dict().items())
    # A new draw finds the same, up to the noise of 16 draws.
    draws = predict(model, guide, validation[0], num_samples=200)
    assert -float(draws.log_prob(validation[1]).mean()) < search.plain_nll


def test_the_search_repeats_itself_and_leaves_random_numbers_and_modes_alone():
    network, model, data, validation = overfitted()
    guide = guide_of(AutoRadial, network, model, data)
    model.train()
    state = torch.get_rng_state()
    first, second = (calibrate_scales(model, guide, validation, norm) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert first == second
    assert first.tried != calibrate_scales(model, guide, validation, norm, seed=1).tried


def test_a_function_gives_relative_scales():
    network, model, data, validation = overfitted()
    guide = guide_of(AutoMeanField, network, model, data)
    search = calibrate_scales(model, guide, validation, lambda name, mean: 1e-6 if "bias" in name else mean.abs() + 0.1)
    posterior = guide.posterior()
    expected = search.number * (network[0].weight.abs() + 0.1)
    torch.testing.assert_close(posterior["0.weight"].stddev, expected.detach(), rtol=1e-4, atol=0.0)
    assert float(posterior["0.bias"].stddev.max()) == pytest.approx(1e-6 * search.number, rel=1e-3)


def many_rows(kind):
    if kind == "regression":
        return one_weight(4000)[:3]
    network, model, data, _ = overfitted()
    x = torch.randn(4000, 5)
    return model, guide_of(AutoRadial, network, model, data), (x, labels(x))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_with_many_rows_a_few_numbers_on_all_of_them_are_enough(kind, monkeypatch):
    model, guide, (x, y) = many_rows(kind)

    def nll_of_all(number):
        guide.set_stddevs({name: torch.full_like(mean, number) for name, mean in guide.loc_scale_means().items()})
        with seeded(3, torch.device("cpu")):
            return -float(predict(model, guide, x, 16).log_prob(y).mean())

    lowest = min(_golden_section(nll_of_all, 1e-4, 10.0, 16, 6).values())
    seen = []

    def counted(model, guide, x, *args):
        seen.append(len(x))
        return predict(model, guide, x, *args)

    monkeypatch.setattr(module, "predict", counted)
    search = calibrate_scales(model, guide, (x, y), seed=3, progress=False)
    # Without noise, then the grid and its refinements on the part, and the best with what is next to it.
    assert seen[:23] == [4000] + 22 * [128]
    assert set(seen[23:]) == {4000}
    assert len(seen[23:]) == len(search.tried) <= 5
    # The golden section itself ends within this of the minimum.
    assert search.nll == min(search.tried.values()) < lowest + 0.001
    assert search.tried == pytest.approx({number: nll_of_all(number) for number in search.tried}, rel=1e-5)
    assert min(search.tried) < search.number < max(search.tried)


def test_the_part_of_many_rows_estimates_the_nll_of_all(monkeypatch):
    model, guide, (x, y) = many_rows("classification")
    found = []

    def searched(evaluate, *args):
        found.append({number: evaluate(number) for number in (0.01, 0.1, 0.3, 1.0)})
        return found[0]

    monkeypatch.setattr(module, "_golden_section", searched)
    calibrate_scales(model, guide, (x, y), progress=False)
    for number, estimate in found[0].items():
        guide.set_stddevs({name: torch.full_like(mean, number) for name, mean in guide.loc_scale_means().items()})
        with seeded(0, torch.device("cpu")):
            per_row = -predict(model, guide, x, 16).log_prob(y)
        # Four standard errors of as many rows drawn at random.
        assert estimate == pytest.approx(float(per_row.mean()), abs=4 * float(per_row.std()) / 128**0.5)


def test_a_row_outside_of_the_part_whose_density_overflows_leads_to_smaller_scales():
    model, guide, (x, y), _ = one_weight(2000)
    # Without noise its NLL is the smallest.
    x[0] = 1e21
    y[0] = x[0] * guide.median()["weight"][0]
    search = calibrate_scales(model, guide, (x, y), progress=False)
    assert search.number == pytest.approx(1e-4)
    assert search.number == min(search.tried)
    assert math.isfinite(search.nll)
    assert max(search.tried.values()) == math.inf


def test_progress_counts_rows(capsys):
    model, guide, rows, _ = one_weight(60)
    calibrate_scales(model, guide, rows, num_samples=2)
    assert "scales" in (shown := capsys.readouterr().err)
    assert f"{60 + 22 * 2 * 60}/{60 + 22 * 2 * 60}" in shown
    calibrate_scales(model, guide, rows, num_samples=2, progress=False)
    assert capsys.readouterr().err == ""


def test_a_search_whose_best_lies_beyond_its_range_ends_at_the_end():
    model, guide, rows, _ = one_weight()
    search = calibrate_scales(model, guide, rows, low=1e-4, high=1e-2)
    assert search.number == max(search.tried)


def searched(best, low, high, num_grid, num_refinements):
    """The numbers that a search for the minimum of a parabola in log number has tried."""
    search = _golden_section(lambda number: math.log(number / best) ** 2, low, high, num_grid, num_refinements)
    return search, min(search, key=search.get)


@pytest.mark.parametrize("best", [0.02, 0.37, 1.0, 9.0])
def test_the_interval_shrinks_by_the_golden_ratio(best):
    tried, found = searched(best, 1e-2, 10.0, 7, 10)
    # Two steps of the grid, then nine times the golden ratio.
    assert abs(math.log(found / best)) < 2 * math.log(1e3) / 6 * 0.6181**9
    assert len(tried) == 17


@pytest.mark.parametrize("num_refinements", [0, 1, 2, 3])
def test_as_many_numbers_are_tried_as_asked_for(num_refinements):
    tried, found = searched(0.01, 0.1, 1.0, 4, num_refinements)
    assert len(tried) == 4 + num_refinements
    assert found == pytest.approx(0.1)


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
        ({"scales": "he"}, r"scales must be a function of a site's name and its mean, or None, got 'he'"),
        ({"low": 0.0}, "low must be a positive finite number, got 0.0"),
        ({"low": 2.0, "high": 1.0}, "high must be larger than low, got 1.0 and 2.0"),
        ({"num_samples": 0}, "num_samples must be a positive integer, got 0"),
        ({"progress": "x"}, "progress must be True or False, got 'x'"),
    ],
)
def test_bad_input_is_named(options, message):
    network, model, data, validation = overfitted(steps=1)
    guide = guide_of(AutoRadial, network, model, data)
    with pytest.raises(ValueError, match=message):
        calibrate_scales(model, guide, validation, **options)


def test_a_guide_that_has_no_scales_to_set_is_named():
    network, model, data, validation = overfitted(steps=1)
    with pytest.raises(RuntimeError, match=r"the guide has no parameters yet; call guide.setup"):
        calibrate_scales(model, AutoRadial(model), validation)
    with pytest.raises(ValueError, match="guide must be one of this library, such as AutoRadial, got Sequential"):
        calibrate_scales(model, network, validation)
    points = guide_of(lambda model: AutoRadial(model, families={".": Delta()}), network, model, data)
    with pytest.raises(ValueError, match=r"a site with a location and a scale, got .*Delta"):
        calibrate_scales(model, points, validation)
