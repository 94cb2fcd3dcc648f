# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Labels that do not count, against torch's cross entropy with an ignored index."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, TermsELBO, fit, predict
from pyro_radial.nn.likelihoods import MaskedCategorical
from pyro_radial.uncertainty import evaluate


class Tokens(nn.Module):
    """Logits ``[N, T, K]`` for numbers ``[N, T]``."""

    def __init__(self, classes=3):
        super().__init__()
        self.linear = nn.Linear(1, classes)

    def forward(self, x):
        return self.linear(x.unsqueeze(-1))


def problem(rows=8, length=5):
    x = torch.randn(rows, length)
    y = torch.randint(3, (rows, length))
    y[:, 3:] = -100
    y[0, 1:] = -100
    model = SupervisedModel(BayesianModule(Tokens()), MaskedCategorical(event_dim=2))
    return x, y, model, AutoMeanField(model)


def test_labels_that_do_not_count_add_nothing():
    f = torch.randn(4, 5, 3, requires_grad=True)
    y = torch.randint(3, (4, 5))
    y[1] = y[2, 3:] = -100
    value = MaskedCategorical(event_dim=2).observation(f).log_prob(y)
    expected = -cross_entropy(f.movedim(-1, 1), y, reduction="none").sum(-1)
    torch.testing.assert_close(value, expected)
    gradient, of_torch = (torch.autograd.grad(v.sum(), f, retain_graph=True)[0] for v in (value, expected))
    torch.testing.assert_close(gradient, of_torch)


def test_a_loss_counts_rows_and_is_the_sum_over_labels():
    x, y, model, guide = problem()
    model.likelihood.num_data = 80
    elbo = TermsELBO()
    elbo(model, guide)(x, y)
    torch.manual_seed(1)
    elbo(model, guide)(x, y)
    torch.manual_seed(1)
    draw = guide(x, y)
    f = x.unsqueeze(-1) @ draw["linear.weight"].T + draw["linear.bias"]
    by_hand = 10 * cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum")
    torch.testing.assert_close(elbo.terms.negative_log_likelihood, by_hand)


def test_scores_are_those_of_the_labels_that_count():
    x, y, model, guide = problem()
    fit(model, guide, (x, y), epochs=1, progress=False)
    torch.manual_seed(2)
    found = evaluate(model, guide, (x, y), num_samples=16)
    torch.manual_seed(2)
    prediction = predict(model, guide, x, 16)
    there = y != -100
    probs = prediction.mean[there].gather(-1, y[there].unsqueeze(-1))
    assert found.scores["NLL"] == pytest.approx(-float(probs.log().mean()), abs=1e-5)
    right = (prediction.mean.argmax(-1) == y)[there].float().mean()
    assert found.scores["accuracy"] == pytest.approx(float(right))
    of_rows = prediction.likelihood.observation(prediction.samples).log_prob(y)
    torch.testing.assert_close(prediction.log_prob(y), of_rows.logsumexp(0) - torch.tensor(16.0).log())
    assert found.plot() is not None


def test_unfamiliar_inputs_need_one_label_per_point():
    x, y, model, guide = problem()
    guide.setup(x, y)
    with pytest.raises(ValueError, match=r"ood must be None for many labels per point \(event_dim=2\)"):
        evaluate(model, guide, (x, y), ood=x, num_samples=2)


def test_a_batch_without_labels_adds_nothing_but_gives_no_scores():
    x, y, model, guide = problem()
    elbo = TermsELBO()
    elbo(model, guide)(x, torch.full_like(y, -100))
    assert float(elbo.terms.negative_log_likelihood) == 0.0
    with pytest.raises(ValueError, match="test must hold at least one label that counts, got only -100"):
        evaluate(model, guide, (x, torch.full_like(y, -100)), num_samples=2)
