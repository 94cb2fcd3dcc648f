# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""IVON ends at the best diagonal normal, and predicts as any guide does; these need its package, but for the last."""

import sys

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel, predict
from pyro_radial.infer.posthoc.ivon import fit_ivon
from pyro_radial.nn import likelihoods
from tests.helpers.trained import labels


@pytest.fixture
def ivon():
    return pytest.importorskip("ivon", reason="needs ivon-opt: pip install 'pyro-radial[ivon]'")


def regression():
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.5 * torch.randn(40, 1)
    network = nn.Linear(3, 1, bias=False)
    return SupervisedModel(BayesianModule(network, prior=dist.Normal(0.0, 0.7)), likelihoods.Gaussian(scale=0.5)), (
        x,
        y,
    )


def test_linear_regression_ends_at_the_best_diagonal_normal(ivon):
    model, (x, y) = regression()
    guide = fit_ivon(model, (x, y), epochs=3000, batch_size=40, lr=0.05, hess_init=4.0, beta2=0.999)
    precision = x.mT @ x / 0.5**2 + torch.eye(3) / 0.7**2
    mean = torch.linalg.solve(precision, x.mT @ y / 0.5**2)[:, 0]
    posterior = guide.posterior()["weight"]
    # The rate falls to zero, so that the mean has little noise; the Hessian is an average of about 2000 draws.
    torch.testing.assert_close(posterior.mean[0], mean, rtol=0.0, atol=0.01)
    torch.testing.assert_close(posterior.stddev[0], precision.diagonal().rsqrt(), rtol=0.1, atol=0.0)


def test_a_classifier_learns_and_leaves_everything_else_as_it_was(ivon):
    torch.manual_seed(0)
    x = torch.randn(600, 5)
    y = labels(x)
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    model.eval()
    guide = fit_ivon(model, (x[:400], y[:400]), epochs=50, batch_size=40)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    draws = predict(model, guide, x[400:], num_samples=50)
    assert float((draws.mean.argmax(-1) == y[400:]).float().mean()) > 0.85
    again = fit_ivon(model, (x[:400], y[:400]), epochs=50, batch_size=40).median()
    assert all(torch.equal(again[name], value) for name, value in guide.median().items())


def classifier(network, **options):
    return SupervisedModel(BayesianModule(network, **options), likelihoods.Categorical())


DATA = (torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Linear(2, 2), {}, "model must be a SupervisedModel, got Linear"),
        (
            classifier(nn.Linear(2, 2), prior=dist.Normal(1.0, 1.0)),
            {},
            "site 'weight' must have a zero-mean normal prior",
        ),
        (classifier(nn.Linear(2, 2), prior=dist.Laplace(0.0, 1.0)), {}, "of one variance, got Laplace"),
        (
            classifier(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))),
            {},
            r"no parameters besides real-valued sites, got \['bnn.net.1.weight",
        ),
        (classifier(nn.Linear(2, 2)), {"epochs": 0}, "epochs must be a positive integer, got 0"),
        (classifier(nn.Linear(2, 2)), {"lr": 0.0}, "lr must be a positive finite number, got 0.0"),
        (classifier(nn.Linear(2, 2)), {"beta2": 1.0}, "beta2 must be at least zero and less than one, got 1.0"),
        (classifier(nn.Linear(2, 2)), {"lr": 1e30, "epochs": 20}, "lr must be smaller, because site"),
    ],
)
def test_bad_input_is_named(ivon, model, options, message):
    with pytest.raises(ValueError, match=message):
        fit_ivon(model, DATA, **{"epochs": 1, **options})


def test_without_its_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ivon", None)
    with pytest.raises(ImportError, match=r"fit_ivon needs ivon-opt: pip install 'pyro-radial\[ivon\]'"):
        fit_ivon(classifier(nn.Linear(2, 2)), DATA, epochs=1)
