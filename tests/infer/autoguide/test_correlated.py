# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Correlated weights: moments of draws, closed forms, the exact posterior of linear regression, and bad input."""

import copy
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import (
    BayesianModule,
    FunctionalELBO,
    PriorChain,
    SupervisedModel,
    diagnose,
    fit,
    predict,
)
from pyro_radial.functional import GaussianProcess, LinearizedKL, PosteriorProcess
from pyro_radial.infer.autoguide import AutoCorrelated
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import local_reparameterization

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def ready(model, **kwargs):
    guide = AutoCorrelated(model, init_stddev=0.3, **kwargs)
    guide.setup(X)
    return guide


def flat(values, guide, start=0):
    return torch.cat([values[name].flatten(start) for name in guide.correlated], -1)


@pytest.mark.parametrize(("sites", "rank"), [("last layer", None), ("network", 3)])
def test_draws_have_the_covariance(sites, rank):
    pyro.set_rng_seed(0)
    guide = ready(BayesianModule(network()), sites=sites, rank=rank)
    with pyro.plate("draws", 4000):
        draws = flat(guide(X), guide, 1).detach()
    covariance = guide.covariance()
    stddev = covariance.diagonal().sqrt()
    error = (draws.T.cov() - covariance) / stddev[:, None] / stddev
    assert float(error.abs().max()) < 5 * (2 / 4000) ** 0.5
    mean = flat(guide.median(), guide)
    assert float(((draws.mean(0) - mean) / stddev).abs().max()) < 5 * (1 / 4000) ** 0.5


def test_marginals_and_quantiles_are_those_of_the_vector():
    guide = ready(BayesianModule(network()), sites="network", rank=2)
    posterior = guide.posterior()
    variance = torch.cat([posterior[name].variance.flatten() for name in guide.correlated])
    torch.testing.assert_close(variance, guide.covariance().diagonal())
    found = guide.quantiles([0.1, 0.5])["0.weight"]
    normal = posterior["0.weight"].base_dist
    torch.testing.assert_close(found, torch.stack([normal.icdf(torch.tensor(q)) for q in (0.1, 0.5)]))


def test_linearized_predictions_have_the_covariances_of_the_weights():
    bnn = BayesianModule(nn.Linear(3, 2))
    model = SupervisedModel(bnn, likelihoods.Gaussian(scale=0.5))
    guide = ready(model, rank=4)
    covariance = guide.covariance()
    weight, bias = covariance[:6, :6].reshape(2, 3, 2, 3), covariance[6:, 6:]
    both = covariance[:6, 6:].reshape(2, 3, 2)
    mean, found = PosteriorProcess(bnn, guide.posterior()).moments(X)
    for o in range(2):
        cross = X @ both[o, :, o]
        exact = X @ weight[o, :, o] @ X.T + bias[o, o] + cross[:, None] + cross
        torch.testing.assert_close(found[o], exact.double())
    torch.testing.assert_close(mean, nn.functional.linear(X, *guide.median().values()).double())
    pyro.set_rng_seed(0)
    linearized = predict(model, guide, X, num_samples=4000, method="linearized").samples
    variance = found.diagonal(dim1=1, dim2=2).T.float()
    torch.testing.assert_close(linearized.var(0), variance, rtol=5 * (2 / 4000) ** 0.5, atol=0.0)


def regression():
    """A linear model with as many points as weights, and the mean and covariance of its exact posterior."""
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]]) + 0.3 + 0.5 * torch.randn(8, 1)
    model = SupervisedModel(BayesianModule(nn.Linear(3, 1)), likelihoods.Gaussian(scale=0.5))
    design = torch.cat([x, torch.ones(8, 1)], 1).double()
    covariance = (design.T @ design / 0.25 + torch.eye(4)).inverse()
    return model, x, y, covariance @ design.T @ y.double() / 0.25, covariance


def gradients(times):
    """Gradients of the loss in all parameters, in several draws, at the exact posterior with a wider factor."""
    model, x, y, mean, covariance = regression()
    guide = AutoCorrelated(model)
    guide.setup(x, y)
    guide.load_means({"weight": mean[:3].T.float(), "bias": mean[3].float()})
    guide.set_factor(times * torch.linalg.cholesky(covariance).float())
    points = torch.cat([torch.eye(3), torch.zeros(1, 3)])
    prior = GaussianProcess(lambda a, b: 1.0 + a @ b.T)
    elbo = FunctionalELBO(
        prior, lambda x: points, divergence=LinearizedKL(), compare_at="measurement_points", num_functions=500
    )
    loss, found = elbo(model, guide), []
    trained = [value for name, value in guide.named_parameters() if "own" not in name]
    for seed in range(20):
        pyro.set_rng_seed(seed)
        found.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss(x, y), trained)]))
    found = torch.stack(found)
    return found.mean(0) / (found.std(0) / 20**0.5 + 1e-5)


def test_the_loss_is_stationary_at_the_exact_posterior_and_not_beside_it():
    assert float(gradients(1.0).abs().max()) < 4.5
    assert float(gradients(1.2).abs().max()) > 20


def test_a_state_and_a_copy_hold_the_covariance():
    bnn = BayesianModule(network())
    guide, other = ready(bnn, rank=3), ready(bnn, rank=3)
    other.load_state_dict(guide.state_dict())
    for same in (other, copy.deepcopy(guide)):
        assert torch.equal(same.covariance(), guide.covariance())


def test_a_chain_and_a_diagnosis_take_it():
    pyro.set_rng_seed(0)
    model = SupervisedModel(BayesianModule(network()), likelihoods.Gaussian(scale=0.5))
    chain = PriorChain(model)
    guide = chain.guide(partial(AutoCorrelated, init_stddev=0.1))
    fit(chain, guide, (X, torch.zeros(4, 2)), epochs=30, progress=False)
    chain.advance(guide)
    following = chain.guide(AutoCorrelated)
    following.setup(X, torch.zeros(4, 2))
    assert all(torch.equal(following.median()[name], value) for name, value in guide.median().items())
    assert diagnose(chain, following, (X, torch.zeros(4, 2))).noise > 0.0


def in_a_plate(x):
    with pyro.plate("rows", 3):
        pyro.sample("w", dist.Normal(0.0, 1.0))


INSTEAD = r"AutoMeanField\(model, families={'w': families.MultivariateNormal\(\)}\) correlates the elements of each"


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (BayesianModule(nn.Sequential(nn.Linear(3, 2), nn.Tanh())), {}, "model must have a network that ends with"),
        (lambda x: pyro.sample("w", dist.Normal(0.0, 1.0)), {"sites": "network"}, "model must have networks"),
        (BayesianModule(nn.Linear(3, 2)), {"sites": ["gain"]}, "sites must be among"),
        (BayesianModule(nn.Linear(3, 2)), {"rank": 9}, "rank must be at most 8"),
        (in_a_plate, {"sites": ["w"]}, f"outside of plates, got 'w'; {INSTEAD}"),
        (lambda x: pyro.sample("w", dist.LogNormal(0.0, 1.0)), {"sites": ["w"]}, f"real-valued .*; {INSTEAD}"),
    ],
)
def test_sites_that_cannot_be_correlated_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        ready(model, **arguments)


def test_a_factor_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"rank must be at most \d+ for the 40200 elements of 2 sites, got a full"):
        AutoCorrelated(BayesianModule(nn.Linear(200, 200)), sites="network").setup(torch.zeros(1, 200))


def test_local_reparameterization_is_refused():
    guide = ready(BayesianModule(network()))
    with pytest.raises(ValueError, match=r"'2\.weight' must have independent elements"), local_reparameterization():
        guide(X)
