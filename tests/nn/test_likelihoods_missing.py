# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Missing targets, against the density of the observed ones and torch's cross entropy with an ignored index."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.nn.functional import cross_entropy

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import evaluate
from tests.helpers.networks import Net

NAN = math.nan
NUMBERS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
OBSERVED = torch.tensor([[True, False], [False, False], [True, True]])
CASES = {
    "Bernoulli": (likelihoods.Bernoulli(), 2, NUMBERS),
    "Categorical": (likelihoods.Categorical(event_dim=2), (2, 4), NUMBERS.long()),
    "Gaussian": (likelihoods.Gaussian(scale=0.7), 2, NUMBERS),
    "HeteroscedasticGaussian": (likelihoods.HeteroscedasticGaussian(), 4, NUMBERS),
    "NegativeBinomial": (likelihoods.NegativeBinomial(), 2, NUMBERS),
    "Poisson": (likelihoods.Poisson(), 2, NUMBERS),
    "ZeroInflated": (likelihoods.ZeroInflated(likelihoods.Poisson()), 2, NUMBERS),
}


def log_densities(likelihood, f, *targets):
    """The log density of the targets of each row."""
    site = poutine.trace(likelihood).get_trace(f, *targets).nodes["y"]
    return site["fn"].log_prob(site["value"])


@pytest.mark.parametrize(("likelihood", "outputs", "y"), CASES.values(), ids=CASES)
def test_missing_targets_add_nothing_to_density_and_gradient(likelihood, outputs, y):
    torch.manual_seed(0)
    f = torch.randn(3, *(outputs if isinstance(outputs, tuple) else (outputs,)), requires_grad=True)
    missing = y.masked_fill(~OBSERVED, NAN if y.is_floating_point() else -100)
    noise = likelihood.noise(f)
    leaf_density = likelihood.observation(f, **noise).base_dist.log_prob(y)
    expected = torch.stack([leaf_density[0, 0], torch.zeros(()), leaf_density[2].sum()])
    expected_gradient = torch.autograd.grad(expected[0] + expected[2], f, retain_graph=True)[0][[0, 2]]
    for targets in ((missing,), (y, OBSERVED), (missing, OBSERVED)):
        densities = log_densities(likelihood, f, *targets)
        torch.testing.assert_close(densities, expected)
        gradient = torch.autograd.grad(densities.sum(), f, retain_graph=True)[0]
        torch.testing.assert_close(gradient[[0, 2]], expected_gradient)
        assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))


def test_one_target_of_a_row_may_have_no_dim_of_its_own():
    f = torch.zeros(3, 1)
    densities = log_densities(likelihoods.Gaussian(), f, torch.tensor([0.0, NAN, 0.0]))
    assert densities.tolist() == pytest.approx([-0.5 * math.log(2 * math.pi), 0.0, -0.5 * math.log(2 * math.pi)])


def test_only_minus_100_is_a_missing_label_and_only_nan_another_missing_target():
    labels = torch.tensor([156, 3], dtype=torch.uint8)  # as a uint8, -100 is 156
    f = torch.randn(2, 200)
    torch.testing.assert_close(
        log_densities(likelihoods.Categorical(), f, labels), -cross_entropy(f, labels.long(), reduction="none")
    )
    degrees = torch.tensor([[-100], [3]])
    expected = dist.Normal(torch.zeros(2), 1.0).log_prob(degrees[:, 0])
    torch.testing.assert_close(log_densities(likelihoods.Gaussian(), torch.zeros(2, 1), degrees), expected)


def test_fit_refuses_nan_among_targets_without_a_name():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
    with pytest.raises(ValueError, match=r"data: y must not hold NaN, got NaN in 1 of 3 rows, first in row 1"):
        fit(model, AutoMeanField(model), (NUMBERS, torch.tensor([0.0, NAN, 1.0])), epochs=1, progress=False)


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    x, y = torch.randn(8, 5), torch.randint(3, (8, 5))
    y[:, 3:] = -100
    y[0] = -100
    # Logits [N, T, K] for numbers [N, T].
    net = Net(lambda net, x: net.linear(x.unsqueeze(-1)), linear=nn.Linear(1, 3))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(event_dim=2))
    return x, y, model, AutoMeanField(model)


def test_scores_are_those_of_the_labels_that_are_there(tokens):
    x, y, model, guide = tokens
    fit(model, guide, (x, y), epochs=1, progress=False)
    torch.manual_seed(2)
    evaluation = evaluate(model, guide, (x, y), num_samples=16, progress=False)
    torch.manual_seed(2)
    prediction = predict(model, guide, x, 16)
    observed = y != -100
    probs = prediction.mean[observed].gather(-1, y[observed].unsqueeze(-1))
    assert evaluation.scores["NLL"] == pytest.approx(-float(probs.log().mean()), abs=1e-5)
    is_right = (prediction.mean.argmax(-1) == y)[observed].float().mean()
    assert evaluation.scores["accuracy"] == pytest.approx(float(is_right))
    by_draw = -cross_entropy(prediction.samples.movedim(-1, 1), y.expand(16, 8, 5), reduction="none").sum(-1)
    torch.testing.assert_close(prediction.log_prob(y), by_draw.logsumexp(0) - math.log(16))
    assert evaluation.plot() is not None
    with pytest.raises(ValueError, match=r"ood must be None for many labels per point \(event_dim=2\)"):
        evaluate(model, guide, (x, y), ood=x, num_samples=2)
    with pytest.raises(ValueError, match="test must have targets, got only missing ones"):
        evaluate(model, guide, (x, torch.full_like(y, -100)), num_samples=2)
