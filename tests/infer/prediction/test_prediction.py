# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Summaries of draws are those of the book."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods
from tests.helpers.predictions import CLASSES, GAMMA, POINTS, X, draws, problem


def by_hand(distribution, link, y, samples):
    """Mean, variance within and between draws, and log density of each point, draw by draw in double precision."""
    means, variances, densities = [], [], []
    for s in range(len(samples)):
        observation = distribution(s, samples[s].double())
        means.append(link(s, samples[s].double()))
        variances.append(observation.variance)
        densities.append(observation.log_prob(y.double()).reshape(len(y), -1).sum(-1).exp())
    means, variances = torch.stack(means), torch.stack(variances)
    spread = (means - means.mean(0)).square().mean(0)
    return means.mean(0), variances.mean(0), spread, torch.stack(densities).mean(0).log()


def test_joined_predictions_are_their_equal_mixture():
    y = torch.randint(CLASSES, (POINTS,))
    parts = [Prediction(torch.randn(4, POINTS, CLASSES), likelihoods.Categorical()) for _ in range(3)]
    joined = Prediction.joined(parts)
    assert joined.samples.shape == (12, POINTS, CLASSES)
    torch.testing.assert_close(joined.mean, torch.stack([part.mean for part in parts]).mean(0))
    density = torch.stack([part.log_prob(y) for part in parts]).logsumexp(0) - math.log(3)
    torch.testing.assert_close(joined.log_prob(y), density)


def test_the_noise_of_joined_predictions_goes_with_their_draws():
    scales = (0.1, 3.0)
    parts = [Prediction(torch.zeros(2, 5, 1), likelihoods.Gaussian(), {"scale": torch.full((2, 1), s)}) for s in scales]
    joined = Prediction.joined(parts)
    assert torch.equal(joined.noise["scale"], torch.cat([part.noise["scale"] for part in parts]))
    with pytest.raises(ValueError, match=r"the same outputs at the same inputs, got .*\[5, 1, 'scale'\], \[5, 1\]"):
        Prediction.joined([parts[0], Prediction(torch.zeros(2, 5, 1), likelihoods.Bernoulli())])


COUNTS = (X[:, :1].abs() * 3).floor()
REALS = X[:, :1].sin()
REGRESSION = {
    "bernoulli": (
        likelihoods.Bernoulli(num_data=POINTS),
        COUNTS.clamp_max(1.0),
        lambda s, f, noise: torch.distributions.Bernoulli(1 / (1 + (-f).exp())),
    ),
    "poisson": (likelihoods.Poisson(num_data=POINTS), COUNTS, lambda s, f, noise: torch.distributions.Poisson(f.exp())),
    "negative binomial": (
        likelihoods.NegativeBinomial(num_data=POINTS, concentration=2.0),
        COUNTS,
        lambda s, f, noise: torch.distributions.NegativeBinomial(2.0, logits=f - math.log(2.0)),
    ),
    "extra zeros": (
        likelihoods.ZeroInflated(likelihoods.Poisson(num_data=POINTS), gate=0.25),
        COUNTS,
        lambda s, f, noise: dist.ZeroInflatedPoisson(f.exp(), gate=torch.tensor(0.25)),
    ),
    "fixed noise": (
        likelihoods.Gaussian(num_data=POINTS, scale=0.3),
        REALS,
        lambda s, f, noise: torch.distributions.Normal(f, 0.3),
    ),
    "learned noise": (
        likelihoods.Gaussian(num_data=POINTS, scale=0.4, learn_scale=True),
        REALS,
        lambda s, f, noise: torch.distributions.Normal(f, 0.4),
    ),
    "noise of each output": (
        likelihoods.Gaussian(num_data=POINTS, scale=torch.tensor([0.4])),
        REALS,
        lambda s, f, noise: torch.distributions.Normal(f, 0.4),
    ),
    "random noise": (
        likelihoods.Gaussian(num_data=POINTS, precision_prior=GAMMA),
        REALS,
        lambda s, f, noise: torch.distributions.Normal(f, noise["scale"][s].double()),
    ),
    "heteroscedastic": (
        likelihoods.HeteroscedasticGaussian(num_data=POINTS, floor=0.01),
        REALS,
        lambda s, f, noise: torch.distributions.Normal(f[:, :1], (1 + f[:, 1:].exp()).log() + 0.01),
    ),
}


@pytest.mark.parametrize("kind", REGRESSION)
def test_mean_variance_and_log_density_are_those_computed_by_hand(kind):
    likelihood, y, distribution = REGRESSION[kind]
    outputs = 2 if kind == "heteroscedastic" else 1
    model, guide = problem(likelihood, nn.Linear(2, outputs), y)
    prediction = draws(model, guide, num_samples=40, chunk_size=10)
    assert prediction.samples.shape == (40, POINTS, outputs)

    def distribution_of(s, f):
        return distribution(s, f, prediction.noise)

    mean, within, between, log_density = by_hand(
        distribution_of, lambda s, f: distribution_of(s, f).mean, y, prediction.samples
    )
    assert prediction.mean.shape == prediction.variance.shape == (POINTS, 1)
    # Single against double precision: a few roundings of 6e-8 each, ten times that where exponents grow the error.
    assert torch.allclose(prediction.mean.double(), mean, rtol=1e-5, atol=1e-6)
    assert torch.allclose(prediction.aleatoric_variance.double(), within, rtol=1e-5, atol=1e-6)
    assert torch.allclose(prediction.epistemic_variance.double(), between, rtol=1e-5, atol=1e-6)
    assert torch.allclose(prediction.variance.double(), within + between, rtol=1e-5, atol=1e-6)
    assert torch.allclose(prediction.log_prob(y).double(), log_density, rtol=1e-4, atol=1e-5)
    # [N] stands for [N, 1].
    assert torch.equal(prediction.log_prob(y.squeeze(-1)), prediction.log_prob(y))


def test_class_probabilities_entropy_and_information_are_those_computed_by_hand():
    model, guide = problem()
    prediction = draws(model, guide, num_samples=40)
    probabilities = prediction.samples.double().exp()
    probabilities /= probabilities.sum(-1, keepdim=True)
    mean = probabilities.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    expected = -(probabilities * probabilities.log()).sum(-1).mean(0)
    y = torch.arange(POINTS) % CLASSES
    assert torch.allclose(prediction.mean.double(), mean, atol=1e-6)
    assert torch.allclose(prediction.entropy.double(), entropy, atol=1e-6)
    # A difference of two entropies of order one, each rounded.
    assert torch.allclose(prediction.mutual_information.double(), entropy - expected, atol=2e-6)
    assert torch.allclose(prediction.log_prob(y).double(), mean[torch.arange(POINTS), y].log(), atol=1e-5)


def test_draws_of_targets_are_those_of_their_functions():
    samples = 100.0 * torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 1)
    prediction = Prediction(samples, likelihoods.Gaussian(), {"scale": torch.tensor([[1e-3], [1e-3], [1e-3]])})
    targets = prediction.sample_targets(2)
    assert targets.shape == (6, 2, 1)
    assert targets.round().squeeze(-1).tolist() == [[0, 0], [100, 100], [200, 200]] * 2
    assert len(targets.unique()) == 12
    labels = Prediction(torch.zeros(4, 7, 3), likelihoods.Categorical()).sample_targets()
    assert labels.shape == (4, 7)
    assert set(labels.unique().tolist()) <= {0, 1, 2}


def test_quantiles_are_those_of_the_mixture_of_draws():
    """Two normal distributions far apart, whose mixture has its quantiles within one or the other."""
    functions, points, number = 2, 200, 1000
    samples = torch.tensor([0.0, 100.0], dtype=torch.float64).reshape(2, 1, 1).expand(functions, points, 1)
    prediction = Prediction(samples, likelihoods.Gaussian(), {"scale": torch.ones(2, 1, dtype=torch.float64)})
    levels = [0.1, 0.25, 0.75, 0.9]
    quantiles = prediction.quantiles(levels, num_targets=number)
    assert quantiles.shape == (4, points, 1)
    # Of the thousand draws of each function, a half of which the level is twice as far.
    within = torch.tensor([0.2, 0.5, 0.5, 0.8], dtype=torch.float64)
    normal = dist.Normal(0.0, 1.0)
    expected = normal.icdf(within) + torch.tensor([0.0, 0.0, 100.0, 100.0])
    # The standard error of a sample quantile, over the root of the number of points; the bias is of order 1 / number.
    error = (within * (1 - within) / number).sqrt() / normal.log_prob(normal.icdf(within)).exp()
    gap = (quantiles.mean((1, 2)) - expected).abs()
    assert (gap < 4 * error / math.sqrt(points) + 2 / number).all()
    spread = quantiles.std(1).squeeze(-1)
    assert ((spread / error - 1).abs() < 0.2).all()


def test_what_has_no_quantiles_or_targets_is_named():
    prediction = Prediction(torch.zeros(2, 3, 4), likelihoods.Categorical())
    with pytest.raises(ValueError, match=r"Prediction.quantiles: .* labels of classes, which have no order"):
        prediction.quantiles(0.5)
    for part in ("variance", "aleatoric_variance", "epistemic_variance"):
        with pytest.raises(ValueError, match=rf"Prediction\.{part}: .* labels of classes, which have no variance"):
            getattr(prediction, part)
    for method in (prediction.sample_targets, lambda n: prediction.quantiles(0.5, n)):
        with pytest.raises(ValueError, match="num_targets must be a positive integer, got 0"):
            method(0)
    with pytest.raises(NotImplementedError, match="Poisson"):
        _ = Prediction(torch.zeros(2, 3, 1), likelihoods.Poisson(num_data=3)).entropy
    with pytest.raises(ValueError, match=r"Prediction\.sample_targets: model must have an attribute `likelihood`"):
        Prediction(torch.zeros(2, 3, 1)).sample_targets()
