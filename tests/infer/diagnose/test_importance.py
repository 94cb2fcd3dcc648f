# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The share of the posterior inside intervals is that of known posteriors, and a diagnosis says if it is too small."""

import re
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from pyro.nn import PyroModule
from scipy import stats
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, diagnose
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.diagnose import importance
from pyro_radial.infer.diagnose.importance import (
    NUM_DRAWS,
    IntervalShare,
    interval_shares,
    judge_intervals,
    smooth_weights,
)
from pyro_radial.nn import likelihoods


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    """Tolerances follow from the standard errors that are estimated with the shares."""
    monkeypatch.setattr(importance, "NUM_DRAWS", 100)


class Guide(PyroModule):
    """A guide made of a function, without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def correlated(size=2, correlation=0.6):
    """Return a covariance with ones on its diagonal."""
    return torch.full((size, size), correlation) + (1 - correlation) * torch.eye(size)


def normal_model(covariance):
    """A model with a known posterior: its prior, since nothing is observed."""
    pyro.sample("w", dist.MultivariateNormal(torch.zeros(len(covariance)), covariance))


def best_independent(covariance):
    """Sample from the independent normals that are closest to the posterior."""
    stddev = covariance.inverse().diagonal().rsqrt()
    pyro.sample("w", dist.Normal(torch.zeros(len(covariance)), stddev).to_event(1))


def coverage_of(stddev_ratio):
    """The share of a normal posterior in 90 % intervals of a normal with this ratio of standard deviations."""
    return 2 * stats.norm.cdf(stddev_ratio * stats.norm.ppf(0.95)) - 1


def shares(model, guide, *args, seed=0):
    pyro.set_rng_seed(seed)
    return interval_shares(model, guide, args)[0]


@pytest.mark.parametrize("correlation", [0.3, 0.6])
def test_independent_normals_hold_what_the_closed_form_says(correlation):
    interval = shares(normal_model, best_independent, correlated(correlation=correlation))["w"]
    assert interval.coverage == pytest.approx(coverage_of((1 - correlation**2) ** 0.5), abs=4 * interval.error)
    assert interval.error < 0.1
    assert (interval.numbers, interval.event_numel) == (2, 2)


def test_the_shape_is_that_of_the_ratio_of_variances(monkeypatch):
    """In the direction of the largest variance, 1 + c, the guide has 1 - c^2; the tail has k = 1 - (1 - c) = c."""
    monkeypatch.setattr(importance, "NUM_DRAWS", NUM_DRAWS)
    interval = shares(normal_model, best_independent, correlated(correlation=0.9))["w"]
    assert interval.pareto_k == pytest.approx(0.9, abs=0.2)
    assert shares(normal_model, best_independent, correlated(correlation=0.2))["w"].pareto_k < 0.5


def test_the_posterior_itself_holds_nine_tenths():
    interval = shares(normal_model, normal_model, correlated())["w"]
    assert interval.coverage == pytest.approx(0.9, abs=1e-3)
    assert interval.pareto_k < 0.5


OBSERVED = torch.linspace(-1.0, 2.0, 20).reshape(10, 2)


def conjugate_model(y):
    """Two means with the posteriors N(sum(y) / 11, 1 / 11)."""
    means = pyro.sample("means", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(means, 1.0).to_event(1), obs=y)


def conjugate_guide(y, ratio):
    pyro.sample("means", dist.Normal(y.sum(0) / 11, ratio / 11**0.5).to_event(1))


@pytest.mark.parametrize(("ratio", "word", "findings"), [(1.0, "good", 0), (1 / 3, "unreliable", 1)])
def test_the_k_hat_of_a_guide_is_that_of_a_known_posterior(monkeypatch, ratio, word, findings):
    """In two dims the ratios of normals with standard deviations r to 1 have an exact Pareto tail, of shape 1 - r^2."""
    monkeypatch.setattr(importance, "NUM_DRAWS", NUM_DRAWS)
    diagnosis = diagnose(conjugate_model, Guide(partial(conjugate_guide, ratio=ratio)), (OBSERVED,), intervals=True)
    assert f"Pareto k-hat of the guide: {diagnosis.k_hat:.2f}, {word}" in str(diagnosis)
    assert sum("Pareto k-hat of the guide is" in finding for finding in diagnosis.findings) == findings
    if ratio < 1:
        # Its standard error is about 0.13, and the weak prior at 0.5 has a tenth of the weight.
        assert diagnosis.k_hat == pytest.approx(0.9 * (1 - ratio**2) + 0.05, abs=0.26)


@pytest.mark.parametrize(
    ("k_hat", "word", "finding"),
    [(0.5, "good", None), (0.6, "usable", "0.60, above 0.5 but usable"), (0.8, "unreliable", "0.80, not up to 0.7")],
)
def test_a_k_hat_is_said_in_words(k_hat, word, finding):
    assert importance.k_hat_word(k_hat) == word
    findings = [*importance.judge_k_hat(k_hat)]
    assert len(findings) == (finding is not None)
    assert all(finding in sentence for sentence in findings)


def test_the_k_hat_is_of_all_sites_together():
    """The elements of a plate have separate ratios, which are usable here; all of them together are not."""

    def model(x):
        with pyro.plate("rows", len(x)):
            pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0), obs=x)

    def guide(x):
        with pyro.plate("rows", len(x)):
            pyro.sample("z", dist.Normal(x / 2, 0.75 * 0.5**0.5))

    pyro.set_rng_seed(0)
    intervals, k_hat = interval_shares(model, guide, (OBSERVED.flatten().repeat(3),))
    assert intervals["z"].numbers == 1
    assert intervals["z"].pareto_k < 0.7 < k_hat


def test_a_point_has_no_k_hat_and_a_density_of_nan_is_unreliable():
    assert interval_shares(
        conjugate_model, Guide(lambda y: pyro.sample("means", dist.Delta(y[0], event_dim=1))), (OBSERVED,)
    ) == (
        {},
        None,
    )
    ratios = torch.randn(100, 2, dtype=torch.float64)
    ratios[3, 1] = torch.nan
    assert smooth_weights(ratios)[1].isnan().tolist() == [False, True]
    assert importance.k_hat_word(float("nan")) == "unreliable"
    assert [*importance.judge_k_hat(float("nan"))] != []


def test_a_guide_that_is_too_wide_holds_more():
    def wide(covariance):
        pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))

    assert shares(normal_model, wide, correlated())["w"].coverage > 0.97


X = torch.tensor([-1.0, 0.5, 2.0])


def grouped_model(x):
    center = pyro.sample("center", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        z = pyro.sample("z", dist.Normal(center, 1.0))
        pyro.sample("x", dist.Normal(z, 1.0), obs=x)


def grouped_guide(x, stddev=0.5**0.5):
    center = pyro.sample("center", dist.Normal(5.0, 1.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Normal((center + x) / 2, stddev))


def test_sites_in_a_plate_are_compared_given_the_sites_outside():
    """The conditional posterior of each row is exact, however wrong the center is."""
    intervals = shares(grouped_model, grouped_guide, X)
    assert list(intervals) == ["center", "z"]
    assert intervals["z"].coverage == pytest.approx(0.9, abs=1e-3)
    assert (intervals["z"].numbers, intervals["center"].numbers) == (1, 4)
    assert intervals["center"].coverage < 0.5
    narrow = shares(grouped_model, partial(grouped_guide, stddev=0.6 * 0.5**0.5), X)["z"]
    assert narrow.coverage == pytest.approx(coverage_of(0.6), abs=4 * narrow.error)


def test_elements_of_a_plate_that_are_drawn_together_are_compared_together():
    guide = AutoMultivariateNormal(grouped_model)
    guide(X)
    intervals = shares(grouped_model, guide, X)
    assert {interval.numbers for interval in intervals.values()} == {4}


def test_a_loop_is_like_sites_of_their_own():
    def model(loops):
        for index in pyro.plate("rows", 2) if loops else range(2):
            pyro.sample(f"w_{index}", dist.Normal(0.0, 1.0))

    assert shares(model, model, True) == shares(model, model, False)


def test_crossed_plates_and_dims_of_no_plate_keep_their_elements(monkeypatch):
    monkeypatch.setattr(importance, "NUM_DRAWS", 20)

    def model(stddev):
        outer, inner = pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 3, dim=-1)
        with inner:
            pyro.sample("a", dist.Normal(torch.zeros(3, 2), stddev).to_event(1))
        with outer, inner:
            pyro.sample("b", dist.Normal(0.0, stddev))
        with outer:
            pyro.sample("c", dist.Normal(torch.zeros(4, 2, 1), stddev))

    intervals = shares(model, lambda stddev: model(0.6 * stddev), 1.0)
    # Of one element of `inner`, of both plates, and of `outer`; sites in more plates are drawn along.
    assert {name: interval.numbers for name, interval in intervals.items()} == {"a": 4, "b": 1, "c": 7}
    assert {name: interval.event_numel for name, interval in intervals.items()} == {"a": 2, "b": 1, "c": 1}


def test_points_have_no_intervals():
    guide = AutoDelta(grouped_model)
    guide(X)
    assert shares(grouped_model, guide, X) == {}


def test_a_mini_batch_is_named():
    def model():
        with pyro.plate("genes", 10, subsample_size=4):
            pyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="data must have all rows of the plate 'genes', got 4 of 10"):
        interval_shares(model, model, ())


def test_smoothed_weights_are_those_of_arviz():
    array_stats = pytest.importorskip("arviz_stats.base").array_stats
    torch.manual_seed(0)
    z = torch.randn(NUM_DRAWS, 4, dtype=torch.float64)
    log_ratios = torch.stack([0.2 * z[:, 0], 2 * z[:, 1], 0.4 * z[:, 2].square(), z[:, 3].square()], -1)
    weights, shapes = smooth_weights(log_ratios)
    for index in range(4):
        log_weights, shape = array_stats.psislw(-log_ratios[:, index].numpy())
        np.testing.assert_allclose(weights[:, index].numpy(), np.exp(log_weights), rtol=1e-10)
        assert float(shapes[index]) == pytest.approx(float(shape), rel=1e-10)


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0])
def test_the_shape_of_pareto_ratios_is_found(shape):
    ratios = stats.genpareto.rvs(shape, size=(NUM_DRAWS, 200), random_state=0)
    _, shapes = smooth_weights(torch.as_tensor(ratios).log())
    # The standard error of one is about 0.13, and the weak prior at 0.5 has a tenth of the weight.
    assert float(shapes.mean()) == pytest.approx(0.9 * shape + 0.05, abs=0.05)


def test_equal_ratios_have_equal_weights_and_no_tail():
    weights, shapes = smooth_weights(torch.full((NUM_DRAWS, 2), 3.0, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / NUM_DRAWS))
    assert shapes.tolist() == [0.0, 0.0]


DESIGN = torch.stack([torch.ones(12), torch.arange(12) >= 4], -1)
PRECISION = torch.eye(2) + DESIGN.T @ DESIGN


def gene_model(design, y=None):
    """Genes with a base value and the effect of a condition, a regression with a known posterior."""
    genes = pyro.plate("genes", 20, dim=-1)
    with genes:
        coefficients = pyro.sample("coefficients", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    mean = (design.unsqueeze(-2) * coefficients).sum(-1)
    with genes, pyro.plate("samples", len(design), dim=-2):
        return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def at_the_posterior(family=None):
    """Return a guide with the posterior's means, and its covariance or the closest standard deviations; and targets."""
    pyro.set_rng_seed(0)
    y = gene_model(DESIGN)
    guide = AutoMeanField(gene_model, families=None if family is None else {"coefficients": family})
    means = torch.linalg.solve(PRECISION, DESIGN.T @ y).T
    guide.start_at({"coefficients": dist.MultivariateNormal(means, precision_matrix=PRECISION)})
    guide.setup(DESIGN, y)
    if family is None:
        guide.set_stddevs({"coefficients": PRECISION.diagonal().rsqrt()})
    return guide, y


def test_a_diagnosis_flags_independent_normals_where_elements_are_correlated(monkeypatch):
    monkeypatch.setattr(importance, "NUM_DRAWS", 800)
    guide, y = at_the_posterior()
    random = torch.get_rng_state()
    diagnosis = diagnose(gene_model, guide, (DESIGN, y), intervals=True)
    assert torch.equal(torch.get_rng_state(), random)
    sentences = [finding for finding in diagnosis.findings if "intervals" in finding]
    assert len(sentences) == 1
    assert "The 90% intervals of 'coefficients' are too narrow: they hold about" in sentences[0]
    assert "families={'coefficients': families.MultivariateNormal()}" in sentences[0]
    interval = diagnosis.intervals["coefficients"]
    covariance = PRECISION.inverse()
    ratio = float((PRECISION.diagonal() * covariance.diagonal()).rsqrt()[0])
    # Smoothed weights have a bias, of a few percent for so few draws.
    assert interval.coverage == pytest.approx(coverage_of(ratio), abs=0.06)
    assert "of the posterior, 90% intervals hold: coefficients" in str(diagnosis)
    assert str(diagnosis).startswith("loss for num_data=")


def test_a_diagnosis_does_not_flag_a_full_covariance():
    guide, y = at_the_posterior(families.MultivariateNormal())
    diagnosis = diagnose(gene_model, guide, (DESIGN, y), intervals=True)
    assert not any("intervals" in finding for finding in diagnosis.findings)
    assert diagnosis.intervals["coefficients"].coverage == pytest.approx(0.9, abs=1e-3)


def test_what_is_correlated_across_sites_gets_another_advice():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Normal(a, 0.5))

    def best():
        pyro.sample("a", dist.Normal(0.0, 0.2**0.5))
        pyro.sample("b", dist.Normal(0.0, 0.5))

    diagnosis = diagnose(model, Guide(best), (), intervals=True)
    sentences = [finding for finding in diagnosis.findings if "intervals" in finding]
    assert len(sentences) == 2
    advice = "make them one site with an event, write the model non-centered, or take"
    assert all(advice in sentence for sentence in sentences)
    assert not any("families" in sentence for sentence in sentences)


def test_a_guide_that_is_correlated_already_gets_no_advice_to_be():
    interval = IntervalShare(0.5, 0.01, 0.4, 2, 2)
    joint = list(judge_intervals({"w": interval}, AutoMultivariateNormal(grouped_model)))
    guide = AutoMeanField(normal_model, families={"w": families.MultivariateNormal()})
    guide.setup(correlated())
    full = list(judge_intervals({"w": interval}, guide))
    assert "Write the model non-centered" in joint[0]
    assert not any("families" in sentence for sentence in joint + full)
    assert "AutoMultivariateNormal" not in joint[0]
    assert "It has a full covariance: train longer, or remove coefficients that the data say nothing about" in full[0]
    assert "of the posterior, or less (its worst element)" in full[0]


@pytest.mark.parametrize(
    ("coverage", "error", "pareto_k", "numbers", "words"),
    [
        (0.89, 0.01, 0.4, 5, None),
        (0.80, 0.01, 0.4, 5, "too narrow: they hold about 80% of the posterior"),
        (0.80, 0.04, 0.4, 5, None),
        (0.80, 0.01, 1.4, 5, "too narrow"),
        (0.89, 0.01, 1.4, 5, r"cannot be trusted, since .* \(Pareto k 1.40 above 0.7\)"),
        (0.89, 0.01, float("nan"), 5, "cannot be trusted"),
        (0.60, 0.01, 1.4, 51, "hold is unknown: 51 numbers"),
        (0.60, 0.01, 0.4, 51, "too narrow"),
    ],
)
def test_a_share_too_small_or_a_tail_too_heavy_is_said(coverage, error, pareto_k, numbers, words):
    findings = list(judge_intervals({"w": IntervalShare(coverage, error, pareto_k, numbers, 1)}, guide=None))
    assert len(findings) == (words is not None)
    assert all(re.search(words, sentence) and "w" in sentence for sentence in findings)


def test_of_too_many_numbers_nothing_is_said():
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian())
    x = torch.linspace(-1, 1, 30).unsqueeze(-1)
    diagnosis = diagnose(model, AutoMeanField(model), (x, x), intervals=True)
    assert any("hold is unknown: 61 numbers are drawn together" in finding for finding in diagnosis.findings)
    assert diagnosis.signal is not None
