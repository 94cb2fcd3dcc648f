# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods: densities in closed form, the scale N/B, noise, links and entropies."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from scipy import stats

from pyro_radial.nn.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
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


# Each case: the likelihood, f, y, and the log density of each data point by SciPy or by hand.
def categorical():
    f, y = torch.randn(B, 3), torch.randint(0, 3, (B,))
    return Categorical(num_data=N), f, y, f.log_softmax(-1)[torch.arange(B), y]


def categorical_images():
    f, y = torch.randn(B, 4, 5, 3), torch.randint(0, 3, (B, 4, 5))
    logs = f - torch.logsumexp(f, -1, keepdim=True)
    return Categorical(num_data=N, event_dim=3), f, y, logs.gather(-1, y.unsqueeze(-1)).sum((1, 2, 3))


def bernoulli():
    f, y = torch.randn(B, 2), torch.randint(0, 2, (B, 2))
    return Bernoulli(num_data=N), f, y, stats.bernoulli.logpmf(y, sigmoid(f)).sum(-1)


def bernoulli_flat():
    f, y = torch.randn(B), torch.randint(0, 2, (B,)).bool()
    return Bernoulli(num_data=N, event_dim=0), f, y, stats.bernoulli.logpmf(y.long(), sigmoid(f))


def gaussian():
    f, y = torch.randn(B, 2), torch.randn(B, 2)
    return Gaussian(num_data=N, scale=0.3), f, y, stats.norm.logpdf(y, f, 0.3).sum(-1)


def gaussian_flat():
    f, y = torch.randn(B), torch.randn(B)
    return Gaussian(num_data=N, event_dim=0, scale=0.3), f, y, stats.norm.logpdf(y, f, 0.3)


def gaussian_learned():
    f, y = torch.randn(B, 1), torch.randn(B, 1)
    return Gaussian(num_data=N, scale=0.5, learn_scale=True), f, y, stats.norm.logpdf(y, f, 0.5).sum(-1)


def heteroscedastic():
    f, y = torch.randn(B, 4), torch.randn(B, 2)
    scale = softplus(f[:, 2:].numpy()) + 1e-3
    return HeteroscedasticGaussian(num_data=N), f, y, stats.norm.logpdf(y, f[:, :2], scale).sum(-1)


def poisson():
    f, y = torch.randn(B, 2), torch.randint(0, 5, (B, 2))
    return Poisson(num_data=N), f, y, stats.poisson.logpmf(y, f.exp().numpy()).sum(-1)


def negative_binomial():
    f, y = torch.randn(B, 2), torch.randint(0, 9, (B, 2))
    share = 3.0 / (3.0 + f.exp().numpy())
    return NegativeBinomial(num_data=N, concentration=3.0), f, y, stats.nbinom.logpmf(y, 3.0, share).sum(-1)


CASES = [
    categorical,
    categorical_images,
    bernoulli,
    bernoulli_flat,
    gaussian,
    gaussian_flat,
    gaussian_learned,
    heteroscedastic,
    poisson,
    negative_binomial,
]


@pytest.mark.parametrize("case", CASES)
def test_the_log_likelihood_is_n_over_b_times_the_sum_over_the_batch(case):
    likelihood, f, y, log_prob = case()
    trace = trace_of(likelihood, f, y)
    assert trace.nodes["y"]["fn"].batch_shape == (B,)
    expected = torch.as_tensor(np.asarray(log_prob)).float()
    torch.testing.assert_close(trace.nodes["y"]["unscaled_log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert trace.log_prob_sum().item() == pytest.approx(N / B * expected.sum().item(), rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_draws_are_scored_one_by_one(case):
    likelihood, f, y, _ = case()
    draws = torch.stack([f, f + 0.5, f - 1.0])
    with pyro.plate("particles", 3, dim=-2):
        together = trace_of(likelihood, draws, y)
    assert together.nodes["y"]["log_prob"].shape == (3, B)
    assert together.nodes["f"]["value"].shape == draws.shape
    for index in range(3):
        alone = trace_of(likelihood, draws[index], y)
        torch.testing.assert_close(together.nodes["y"]["log_prob"][index], alone.nodes["y"]["log_prob"])


@pytest.mark.parametrize("case", CASES)
def test_without_targets_any_number_of_points_is_predicted_at_scale_one(case):
    likelihood, f, y, _ = case()
    for points in (f[:1], f, torch.cat([f] * 20)):
        trace = trace_of(likelihood, points)
        assert trace.nodes["y"]["value"].shape == (len(points), *y.shape[1:])
        assert trace.nodes["y"]["scale"] == 1.0
        assert not trace.nodes["y"]["is_observed"]


@pytest.mark.parametrize("case", CASES)
def test_the_inverse_link_is_the_mean_of_the_observation(case):
    likelihood, f, _, _ = case()
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

    def test_learned_noise_finds_the_residuals_size(self):
        likelihood, residual = Gaussian(num_data=N, scale=1.0, learn_scale=True), 0.2 * torch.randn(N, 1)
        svi = SVI(likelihood, lambda f, y: None, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
        for _ in range(300):
            svi.step(torch.zeros(N, 1), residual)
        scale = likelihood.noise(residual)["scale"]
        assert scale.item() == pytest.approx(residual.square().mean().sqrt().item(), rel=0.01)
        assert list(likelihood.state_dict()) == ["scale_unconstrained"]

    def test_a_learned_concentration_finds_that_of_the_counts(self):
        torch.manual_seed(0)
        likelihood = NegativeBinomial(num_data=2_000)
        f = torch.full((2_000, 1), 3.0)
        counts = torch.as_tensor(stats.nbinom.rvs(4.0, 4.0 / (4.0 + math.exp(3.0)), size=(2_000, 1), random_state=0))
        svi = SVI(likelihood, lambda f, y: None, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
        for _ in range(200):
            svi.step(f, counts)
        # Its standard error for so many counts is 0.15.
        assert likelihood.noise(f)["concentration"].item() == pytest.approx(4.0, abs=0.5)
        assert list(likelihood.state_dict()) == ["concentration_unconstrained"]

    def test_a_given_concentration_is_recorded_and_not_trained(self):
        likelihood = NegativeBinomial(num_data=N, concentration=3.0, learn_concentration=False)
        trace = trace_of(likelihood, torch.randn(B, 1), torch.ones(B, 1))
        assert trace.nodes["concentration"]["value"].item() == 3.0
        assert not trace.param_nodes
        assert not list(likelihood.parameters())

    def test_a_large_concentration_is_poisson(self):
        f, y = torch.randn(B, 2, dtype=torch.float64), torch.randint(0, 5, (B, 2))
        wide = trace_of(NegativeBinomial(num_data=N, concentration=1e7), f, y).log_prob_sum()
        poisson = trace_of(Poisson(num_data=N), f, y).log_prob_sum()
        torch.testing.assert_close(wide, poisson, rtol=1e-5, atol=1e-5)

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

    def test_the_floor_bounds_the_heteroscedastic_scale(self):
        distribution = HeteroscedasticGaussian(num_data=N, floor=0.1).observation(torch.tensor([[0.0, -100.0]]))
        assert distribution.stddev.item() == pytest.approx(0.1)


class TestEntropy:
    def test_categorical(self):
        mean = torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
        expected = torch.tensor([stats.entropy([0.2, 0.3, 0.5]), 0.0], dtype=torch.float32)
        torch.testing.assert_close(Categorical(num_data=N).predictive_entropy(mean), expected)

    def test_bernoulli_sums_over_outputs(self):
        entropy = Bernoulli(num_data=N).predictive_entropy(torch.tensor([[0.5, 0.5, 1.0], [0.0, 1.0, 0.1]]))
        expected = [2 * math.log(2), stats.entropy([0.1, 0.9])]
        torch.testing.assert_close(entropy, torch.tensor(expected, dtype=torch.float32))

    @pytest.mark.parametrize("make", [Gaussian, HeteroscedasticGaussian, Poisson, NegativeBinomial])
    def test_others_say_why_they_have_none(self, make):
        with pytest.raises(NotImplementedError, match="no closed-form predictive entropy"):
            make(num_data=N).predictive_entropy(torch.zeros(B, 1))


def test_a_likelihood_of_ones_own_needs_two_methods():
    class Laplace(Likelihood):
        def observation(self, f, **noise):
            return dist.Laplace(f, 1.0).to_event(self.event_dim)

        def inverse_link(self, f):
            return f

    f, y = torch.randn(B, 1), torch.randn(B, 1)
    expected = N / B * stats.laplace.logpdf(y, f).sum()
    assert trace_of(Laplace(num_data=N), f, y).log_prob_sum().item() == pytest.approx(expected, rel=1e-5)
