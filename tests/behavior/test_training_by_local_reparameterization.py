# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math
from functools import partial

import pyro
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, FitOptions, SupervisedModel, TermsELBO, fit
from pyro_radial.infer.diagnose.diagnose import diagnose
from pyro_radial.infer.loss.not_finite import find_not_finite
from pyro_radial.nn import likelihoods
from tests.helpers.devices import CountHostReads
from tests.helpers.local_reparameterization import X, Y, closed_loss, each_guide, each_loss, losses, mlp, regression


@each_guide
@each_loss
def test_loss_and_gradient_have_the_expectation_of_drawn_weights(make, loss):
    model = regression()
    guide = make(model)
    guide.setup(X, Y)
    parameters = list(guide.parameters())
    many = 300
    expected = closed_loss(guide, many)
    gradients = torch.autograd.grad(expected, parameters)
    expected = torch.cat([expected.detach().reshape(1), *(g.flatten() for g in gradients)])
    # One batch with each row many times is many batches.
    x, y = X.repeat(many, 1), Y.repeat(many, 1)
    values = losses(loss()(model, guide), 20, x, y)
    error = values.std(0) / len(values) ** 0.5
    assert bool(((values.mean(0) - expected).abs() <= 5 * error + 2e-4 * expected.abs() + 1e-4).all())


@each_guide
def test_gradients_vary_less_than_with_drawn_weights(make):
    local, drawn = regression(mlp()), regression(mlp(), local_reparameterization=False)
    x, y = X.repeat(16, 1), Y.repeat(16, 1)
    variances = []
    for model in (local, drawn):
        torch.manual_seed(0)
        guide = make(model)
        guide.setup(x, y)
        variances.append(losses(TermsELBO()(model, guide), 60, x, y).var(0)[1:].sum())
    assert variances[0] < 0.5 * variances[1]


def test_fit_trains_validates_pretrains_and_accumulates():
    x = torch.randn(64, 3)
    y = (x @ torch.randn(3, 2)) + 0.1 * torch.randn(64, 2)
    model = SupervisedModel(BayesianModule(mlp()), likelihoods.Gaussian(scale=0.3), local_reparameterization=True)
    guide = AutoRadial(model)
    settings = {"batch_size": 16, "progress": False, "seed": 0, "optim": partial(torch.optim.Adam, lr=0.1)}
    settings["options"] = FitOptions(mean_only_epochs=2, accumulate=2)
    result = fit(model, guide, (x, y), epochs=6, validation=(x, y), **settings)
    assert result.history[-1]["nll"] < 0.5 * result.history[0]["nll"]
    assert math.isfinite(result.history[-1]["validation_nll"])
    diagnose(model, guide, (x, y))


@each_guide
@pytest.mark.parametrize("loss", [TermsELBO, partial(TermsELBO, 2, vectorize_particles=True, max_plate_nesting=1)])
def test_a_loss_reads_no_value_on_the_host(make, loss):
    conv = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    model = regression(conv)
    guide = make(model)
    module = loss()(model, guide)
    with pyro.validation_enabled(False):
        module(X, Y).backward()
        with CountHostReads() as reads:
            module(X, Y).backward()
    assert reads.count == 0


@pytest.mark.parametrize("loss", [TermsELBO, TraceMeanField_ELBO])
def test_what_is_not_drawn_is_no_culprit_of_a_loss_that_is_not_finite(loss):
    model = regression(mlp())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    (culprit,) = find_not_finite(loss(), model, guide, (X, torch.full_like(Y, math.inf)), {}, {})
    assert "y" in culprit
    assert "weight" not in culprit
