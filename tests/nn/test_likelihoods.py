# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods: densities in closed form, the scale N/B, noise, links and entropies, and what they refuse."""

import math
import warnings
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, diagnose, fit
from pyro_radial.nn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    ZeroInflated,
)

N, B = 100, 8


def trace_of(likelihood, f, y=None):
    trace = poutine.trace(likelihood).get_trace(f, y)
    trace.compute_log_prob()
    return trace


def sigmoid(x):
    return 1 / (1 + (-x).exp().numpy())


def softplus(x):
    return np.log1p(np.exp(x))


def log_prob_of_images(f, y):
    logs = f - torch.logsumexp(f, -1, keepdim=True)
    return logs.gather(-1, y.unsqueeze(-1)).sum((1, 2, 3))


def log_prob_with_two_halves(f, y):
    return stats.norm.logpdf(y, f[:, :2], softplus(f[:, 2:].numpy()) + 1e-3).sum(-1)


def log_prob_of_counts(f, y):
    return stats.nbinom.logpmf(y, 3.0, 3.0 / (3.0 + f.exp().numpy())).sum(-1)


def log_prob_with_extra_zeros(f, y):
    return dist.ZeroInflatedPoisson(f.exp(), gate=torch.tensor(0.25)).log_prob(y).sum(-1)


def log_prob_of_counts_with_extra_zeros(f, y):
    gate, concentration = torch.tensor(0.4), torch.tensor(3.0)
    fn = dist.ZeroInflatedNegativeBinomial(concentration, logits=f - concentration.log(), gate=gate)
    return fn.log_prob(y).sum((1, 2))


# Each case: the likelihood, the dims of f and y beside the batch, how many values y takes, if not all numbers, and the
# log density of each data point by SciPy or by hand.
CASES = {
    "categorical": (Categorical(num_data=N), (3,), (), 3, lambda f, y: f.log_softmax(-1)[torch.arange(B), y]),
    "images": (Categorical(num_data=N, event_dim=3), (4, 5, 3), (4, 5), 3, log_prob_of_images),
    "bernoulli": (Bernoulli(num_data=N), (2,), (2,), 2, lambda f, y: stats.bernoulli.logpmf(y, sigmoid(f)).sum(-1)),
    "flat": (Bernoulli(num_data=N, event_dim=0), (), (), bool, lambda f, y: stats.bernoulli.logpmf(y + 0, sigmoid(f))),
    "gaussian": (Gaussian(num_data=N, scale=0.3), (2,), (2,), None, lambda f, y: stats.norm.logpdf(y, f, 0.3).sum(-1)),
    "flat gaussian": (Gaussian(num_data=N, event_dim=0), (), (), None, lambda f, y: stats.norm.logpdf(y, f, 1.0)),
    "learned": (Gaussian(num_data=N, learn_scale=True), (1,), (1,), None, lambda f, y: stats.norm.logpdf(y, f)[:, 0]),
    "noise of each": (
        Gaussian(num_data=N, scale=torch.tensor([0.3, 2.0]), learn_scale=True),
        (2,),
        (2,),
        None,
        lambda f, y: stats.norm.logpdf(y, f, [0.3, 2.0]).sum(-1),
    ),
    "noise of pixels": (
        Gaussian(num_data=N, event_dim=2, scale=1.0 + torch.arange(6.0).reshape(2, 3)),
        (2, 3),
        (2, 3),
        None,
        lambda f, y: stats.norm.logpdf(y, f, 1.0 + np.arange(6.0).reshape(2, 3)).sum((1, 2)),
    ),
    "heteroscedastic": (HeteroscedasticGaussian(num_data=N), (4,), (2,), None, log_prob_with_two_halves),
    "poisson": (Poisson(num_data=N), (2,), (2,), 5, lambda f, y: stats.poisson.logpmf(y, f.exp().numpy()).sum(-1)),
    "extra zeros": (ZeroInflated(Poisson(num_data=N), gate=0.25), (2,), (2,), 4, log_prob_with_extra_zeros),
    "counts with extra zeros": (
        ZeroInflated(NegativeBinomial(num_data=N, event_dim=2, concentration=3.0), gate=0.4, learn_gate=False),
        (2, 3),
        (2, 3),
        4,
        log_prob_of_counts_with_extra_zeros,
    ),
    "counts": (NegativeBinomial(num_data=N, concentration=3.0), (2,), (2,), 9, log_prob_of_counts),
}
each_case = pytest.mark.parametrize("case", CASES)


def example(case):
    """A likelihood, outputs, targets and their log densities."""
    likelihood, f_dims, y_dims, values, log_prob = CASES[case]
    f, y = torch.randn(B, *f_dims), torch.randn(B, *y_dims)
    if values:
        y = torch.randint(0, 2, y.shape).bool() if values is bool else torch.randint(0, values, y.shape)
    return likelihood, f, y, log_prob(f, y)


@each_case
def test_the_log_likelihood_is_n_over_b_times_the_sum_over_the_batch(case):
    likelihood, f, y, log_prob = example(case)
    trace = trace_of(likelihood, f, y)
    assert trace.nodes["y"]["fn"].batch_shape == (B,)
    expected = torch.as_tensor(np.asarray(log_prob)).float()
    torch.testing.assert_close(trace.nodes["y"]["unscaled_log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert trace.log_prob_sum().item() == pytest.approx(N / B * expected.sum().item(), rel=1e-5)


@each_case
def test_draws_are_scored_one_by_one(case):
    likelihood, f, y, _ = example(case)
    draws = torch.stack([f, f + 0.5, f - 1.0])
    with pyro.plate("particles", 3, dim=-2):
        together = trace_of(likelihood, draws, y)
    assert together.nodes["y"]["log_prob"].shape == (3, B)
    assert together.nodes["f"]["value"].shape == draws.shape
    for index in range(3):
        alone = trace_of(likelihood, draws[index], y)
        torch.testing.assert_close(together.nodes["y"]["log_prob"][index], alone.nodes["y"]["log_prob"])


@each_case
def test_without_targets_any_number_of_points_is_predicted_at_scale_one(case):
    likelihood, f, y, _ = example(case)
    for points in (f[:1], f, torch.cat([f] * 20)):
        trace = trace_of(likelihood, points)
        assert trace.nodes["y"]["value"].shape == (len(points), *y.shape[1:])
        assert trace.nodes["y"]["scale"] == 1.0
        assert not trace.nodes["y"]["is_observed"]


@each_case
def test_the_inverse_link_is_the_mean_of_the_observation(case):
    likelihood, f, _, _ = example(case)
    distribution, mean = likelihood.observation(f, **likelihood.noise(f)), likelihood.inverse_link(f)
    if isinstance(likelihood, Categorical):
        base = distribution.base_dist if distribution.event_dim else distribution
        torch.testing.assert_close(mean, base.probs)
    else:
        torch.testing.assert_close(mean, distribution.mean)


@pytest.mark.parametrize("make", [Gaussian, Bernoulli, Poisson, NegativeBinomial])
def test_targets_without_the_last_dim_stand_for_one_output(make):
    f, y = torch.randn(B, 1), torch.randint(0, 2, (B,)).float()
    flat, column = (trace_of(make(num_data=N), f, target).log_prob_sum() for target in (y, y.unsqueeze(-1)))
    assert torch.equal(flat, column)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_distribution_is_in_the_outputs_dtype(dtype):
    f, y = torch.randn(B, 1, dtype=dtype), torch.randint(0, 5, (B, 1))
    counts = NegativeBinomial()
    for likelihood in (Gaussian(scale=0.5), Gaussian(learn_scale=True), HeteroscedasticGaussian(), counts):
        output = f.expand(B, 2) if isinstance(likelihood, HeteroscedasticGaussian) else f
        assert trace_of(likelihood, output, y).nodes["y"]["log_prob"].dtype == dtype


class TestNoise:
    def test_fixed_noise_is_recorded(self):
        trace = trace_of(Gaussian(num_data=N, scale=0.3), torch.randn(B, 1), torch.randn(B, 1))
        assert trace.nodes["noise_scale"]["value"].item() == pytest.approx(0.3)
        assert trace.stochastic_nodes == ["data"]
        assert not trace.param_nodes

    @pytest.mark.parametrize(
        ("make", "name"), [(partial(Gaussian, learn_scale=True), "scale"), (NegativeBinomial, "concentration")]
    )
    def test_the_gradient_of_learned_noise_is_that_of_differences(self, make, name):
        f, y = torch.randn(B, 1, dtype=torch.float64), torch.ones(B, 1)
        likelihoods = [make(num_data=N, **{name: value}) for value in (2.0, 2.001, 1.999)]
        at, above, below = (trace_of(likelihood, f, y).log_prob_sum() for likelihood in likelihoods)
        at.backward()
        ((parameter_name, parameter),) = likelihoods[0].named_parameters()
        assert parameter_name == f"{name}_unconstrained"
        # It is the softplus of the parameter.
        slope = (above - below).item() / 0.002 * parameter.sigmoid().item()
        assert parameter.grad.item() == pytest.approx(slope, rel=1e-3)

    def test_the_noise_of_each_output_is_learned(self):
        pyro.set_rng_seed(0)
        stddevs = torch.tensor([0.1, 2.0])
        model = SupervisedModel(BayesianModule(nn.Linear(1, 2)), Gaussian(scale=torch.ones(2), learn_scale=True))
        x = torch.randn(400, 1)
        y = stddevs * torch.randn(400, 2)
        optim = partial(torch.optim.Adam, lr=0.02)
        fit(model, AutoMeanField(model), (x, y), epochs=300, batch_size=400, optim=optim, progress=False)
        # The standard error is 1 / sqrt(800).
        torch.testing.assert_close(model.likelihood.scale.detach(), stddevs, rtol=0.12, atol=0.0)

    def test_a_given_noise_of_each_output_moves_with_the_model_and_is_not_saved(self):
        likelihood = Gaussian(scale=torch.tensor([1, 2]))
        assert not list(likelihood.parameters())
        assert not likelihood.state_dict()
        assert likelihood.double().scale.dtype == torch.float64

    @pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(1), torch.ones(2, 1), torch.ones(B, 2)])
    def test_a_noise_of_another_shape_is_named(self, scale):
        with pytest.raises(ValueError, match=r"scale must be one number or have the shape \(2,\) of the outputs"):
            Gaussian(scale=scale)(torch.zeros(B, 2), torch.zeros(B, 2))

    def test_a_given_concentration_is_recorded_and_not_trained(self):
        likelihood = NegativeBinomial(num_data=N, concentration=3.0, learn_concentration=False)
        trace = trace_of(likelihood, torch.randn(B, 1), torch.ones(B, 1))
        assert trace.nodes["concentration"]["value"].item() == 3.0
        assert not trace.param_nodes
        assert not list(likelihood.parameters())

    def test_a_precision_is_sampled_outside_the_plate(self):
        likelihood = Gaussian(num_data=N, precision_prior=dist.Gamma(6.0, 6.0))
        f, y = torch.randn(B, 1), torch.randn(B, 1)
        trace = trace_of(likelihood, f, y)
        precision = trace.nodes["precision"]
        assert precision["cond_indep_stack"] == ()
        assert precision["scale"] == 1.0
        scale = precision["value"].item() ** -0.5
        assert trace.nodes["noise_scale"]["value"].item() == pytest.approx(scale)
        expected = stats.gamma.logpdf(precision["value"].item(), 6, scale=1 / 6)
        expected += N / B * stats.norm.logpdf(y, f, scale).sum()
        assert trace.log_prob_sum().item() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("event_dim", [0, 1, 2])
    def test_each_particle_has_its_own_precision(self, event_dim):
        likelihood = Gaussian(num_data=N, event_dim=event_dim, precision_prior=dist.Gamma(6.0, 6.0))
        shape = (B, 2, 3)[: 1 + event_dim]
        f, y = torch.randn(4, *shape), torch.randn(*shape)
        with pyro.plate("particles", 4, dim=-2):
            trace = trace_of(likelihood, f, y)
        precision = trace.nodes["precision"]["value"]
        assert precision.shape == (4, 1)
        log_prob = trace.nodes["y"]["unscaled_log_prob"]
        assert log_prob.shape == (4, B)
        for index in range(4):
            expected = dist.Normal(f[index], precision[index, 0] ** -0.5).to_event(event_dim).log_prob(y)
            torch.testing.assert_close(log_prob[index], expected)


class TestEntropy:
    @pytest.mark.parametrize(
        ("make", "mean", "expected"),
        [
            (Categorical, [[0.2, 0.3, 0.5], [0.0, 0.0, 1.0]], [stats.entropy([0.2, 0.3, 0.5]), 0.0]),
            # Summed over outputs.
            (Bernoulli, [[0.5, 0.5, 1.0], [0.0, 1.0, 0.1]], [2 * math.log(2), stats.entropy([0.1, 0.9])]),
        ],
    )
    def test_it_is_the_closed_form(self, make, mean, expected):
        entropy = make(num_data=N).predictive_entropy(torch.tensor(mean))
        torch.testing.assert_close(entropy, torch.tensor(expected, dtype=torch.float32))

    @pytest.mark.parametrize("make", [Gaussian, HeteroscedasticGaussian, Poisson, NegativeBinomial])
    def test_others_say_why_they_have_none(self, make):
        with pytest.raises(NotImplementedError, match="no closed-form predictive entropy"):
            make(num_data=N).predictive_entropy(torch.zeros(B, 1))


class TestExtraZeros:
    @pytest.mark.parametrize("counts", [Poisson, NegativeBinomial])
    def test_the_gate_of_samples_is_learned(self, counts):
        pyro.set_rng_seed(0)
        x = torch.randn(1000, 1)
        f = 2.0 + 0.5 * x
        y = dist.Poisson(f.exp()).sample() * (torch.rand(1000, 1) > 0.3)
        model = SupervisedModel(BayesianModule(nn.Linear(1, 1)), ZeroInflated(counts()))
        optim = partial(torch.optim.Adam, lr=0.05)
        fit(model, AutoMeanField(model), (x, y), epochs=150, batch_size=1000, optim=optim, progress=False)
        # The standard error is sqrt(0.3 * 0.7 / 1000).
        assert model.likelihood.gate.item() == pytest.approx(0.3, abs=0.045)

    def test_a_given_gate_is_recorded_and_not_trained(self):
        likelihood = ZeroInflated(Poisson(num_data=N), gate=0.25, learn_gate=False)
        trace = trace_of(likelihood, torch.randn(B, 1), torch.ones(B, 1))
        assert trace.nodes["gate"]["value"].item() == 0.25
        assert not list(likelihood.parameters())

    def test_it_takes_the_number_of_data_and_has_the_noise_of_its_counts(self):
        likelihood = ZeroInflated(NegativeBinomial(num_data=N))
        assert likelihood.num_data == N
        assert [name for name, _ in likelihood.named_parameters()] == [
            "gate_unconstrained",
            "likelihood.concentration_unconstrained",
        ]
        assert not likelihood.inverse_link(torch.zeros(2, 1)).requires_grad

    @pytest.mark.parametrize("likelihood", [Gaussian(), Categorical(), "poisson"])
    def test_a_likelihood_that_is_not_of_counts_is_named(self, likelihood):
        with pytest.raises(ValueError, match="likelihood must be a Poisson"):
            ZeroInflated(likelihood)

    def test_targets_that_are_no_counts_are_named(self):
        with pytest.raises(ValueError, match="y must hold counts"):
            ZeroInflated(Poisson())(torch.zeros(B, 1), torch.full((B, 1), 0.5))


def test_a_likelihood_of_ones_own_needs_two_methods():
    class Laplace(Likelihood):
        def observation(self, f, **noise):
            return dist.Laplace(f, 1.0).to_event(self.event_dim)

        def inverse_link(self, f):
            return f

    f, y = torch.randn(B, 1), torch.randn(B, 1)
    expected = N / B * stats.laplace.logpdf(y, f).sum()
    assert trace_of(Laplace(num_data=N), f, y).log_prob_sum().item() == pytest.approx(expected, rel=1e-5)


def changed(y, value, *index):
    """Targets with another value at an index."""
    y = y.clone()
    y[index] = value
    return y


LABELS, ZEROS = torch.tensor([0, 1, 2, 0, 0, 1, 2, -5]), torch.zeros(B, 2)
LABEL = r"y must hold labels from 0 to 2, of 3 classes, for site 'y', got {} at \[4\]"
COUNT = r"y must hold counts, .* for site 'y', got {} at \[4, 1\]"
SHAPE, SEQUENCES = r"y must have shape .* site 'y'", r"y must have shape .*; if .* set event_dim=2 in the likelihood"
MISSING = "y must hold at least one target in each batch, got only missing ones"


@pytest.mark.parametrize(
    ("likelihood", "f_shape", "y", "message"),
    [
        *((Categorical(), (B, 3), changed(LABELS, label, 4), LABEL.format(label)) for label in (-1, 3, 7)),
        *((Poisson(), (B, 2), changed(ZEROS, count, 4, 1), COUNT.format(count)) for count in (-1.0, 1.5)),
        *((NegativeBinomial(), (B, 2), changed(ZEROS, count, 4, 1), COUNT.format(count)) for count in (-1.0, 1.5)),
        (HeteroscedasticGaussian(), (B, 3), None, r"even size.* site 'f'"),
        (Gaussian(), (B, 2), torch.zeros(B), SHAPE),
        (Gaussian(), (B, 1), torch.zeros(1, B), SHAPE),
        (Gaussian(event_dim=0), (B,), torch.zeros(B, 1), SHAPE),
        (Bernoulli(), (B, 2), torch.zeros(B, 3), SHAPE),
        (Poisson(), (3, B, 1), torch.zeros(3, B, 1), SHAPE),
        (HeteroscedasticGaussian(), (B, 2), torch.zeros(B, 2), SHAPE),
        (Gaussian(), (B, 5, 3), torch.zeros(B, 5, 3), SEQUENCES),
        (Poisson(), (B, 5, 3), torch.zeros(B, 5), SEQUENCES),
        (Categorical(), (B, 5, 3), torch.zeros(B, 5).long(), SEQUENCES),
        (Gaussian(), (3, 2), torch.full((3, 2), math.nan), MISSING),
        (Categorical(), (3, 2), torch.full((3,), -100), MISSING),
    ],
)
def test_targets_that_do_not_fit_are_named(likelihood, f_shape, y, message):
    likelihood.num_data = N
    with pytest.raises(ValueError, match=message):
        likelihood(torch.zeros(f_shape), y)


@pytest.mark.parametrize("make", [Categorical, Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson, NegativeBinomial])
def test_more_targets_than_num_data_is_named(make):
    f, y = torch.zeros(B, 2), torch.zeros(B, dtype=torch.long)
    y = y if make is Categorical else y[:, None].expand(B, 1 if make is HeteroscedasticGaussian else 2)
    with pytest.raises(ValueError, match=f"num_data must be at least {B}, the number of targets in y, got {B - 1}"):
        make(num_data=B - 1)(f, y)
    make(num_data=B - 1)(f)


@pytest.mark.parametrize("options", [{"scale": 1.0}, {"learn_scale": True}])
def test_two_kinds_of_noise_are_named(options):
    with pytest.raises(ValueError, match="precision_prior"):
        Gaussian(precision_prior=dist.Gamma(6.0, 6.0), **options)


class EndsIn(nn.Module):
    def __init__(self, function, size):
        super().__init__()
        self.layer, self.function = nn.Linear(2, size), function

    def forward(self, x):
        return self.function(self.layer(x))


def scales_at_the_end(f):
    return torch.cat([f[:, :1], f[:, 1:].exp()], -1)


class OfProbabilities(Categorical):
    def observation(self, f, **noise):
        return dist.Categorical(probs=f)


@pytest.mark.parametrize(
    ("likelihood", "function", "size", "name"),
    [
        (Categorical(), nn.Softmax(-1), 2, "Softmax"),
        (Categorical(), lambda f: f.softmax(-1).to(torch.float64).float(), 2, "Softmax"),
        (Categorical(), torch.sigmoid, 2, "Sigmoid"),
        (Bernoulli(event_dim=0), lambda f: f.sigmoid().squeeze(-1), 1, "Sigmoid"),
        (Bernoulli(), nn.LogSigmoid(), 1, "LogSigmoid"),
        (Poisson(), nn.Softplus(), 1, "Softplus"),
        (NegativeBinomial(), torch.exp, 1, "Exp"),
        (ZeroInflated(Poisson()), torch.exp, 1, "Exp"),
        (HeteroscedasticGaussian(), scales_at_the_end, 2, "Exp"),
        (Categorical(), nn.LogSoftmax(-1), 2, None),
        (Categorical(), lambda f: 5.0 * f.softmax(-1), 2, None),
        (Categorical(), lambda f: f.clamp(0.0, 1.0), 2, None),
        (OfProbabilities(), nn.Softmax(-1), 2, None),
        (Gaussian(), nn.Sigmoid(), 1, None),
        (Bernoulli(), nn.Identity(), 1, None),
    ],
)
def test_a_network_that_ends_in_the_function_of_its_likelihood_is_warned_of_once(likelihood, function, size, name):
    model = SupervisedModel(BayesianModule(EndsIn(function, size)), likelihood)
    guide, x = AutoMeanField(model), torch.randn(B, 2)
    y = torch.arange(B) % 2 if isinstance(likelihood, Categorical) else (torch.arange(B) % 2).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, guide, (x, y), epochs=3, progress=False)
        findings = [text for text in diagnose(model, guide, (x, y)).findings if "Leave the last function out" in text]
    texts = [str(warning.message) for warning in caught]
    assert texts == findings
    assert len(texts) == (name is not None)
    assert name is None or texts[0].startswith(
        f"The network ends in {name}, but the likelihood {type(likelihood).__name__} takes "
    )
