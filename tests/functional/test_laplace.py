# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Laplace in function space: exact linear models, the exact process in one dimension, classification, bad input."""

import math

import pyro
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel, predict
from pyro_radial.functional import GaussianProcess, ImplicitProcess, PosteriorProcess, function_space_laplace
from pyro_radial.infer.posthoc.laplace import output_hessian
from pyro_radial.nn import likelihoods

NOISE = 0.1
X = torch.cat([torch.linspace(-1, -0.3, 8), torch.linspace(0.3, 1, 8)])[:, None]
Y = torch.sin(4 * X)
POINTS = torch.cat([X, torch.linspace(-2, 2, 33)[:, None]])


def smooth():
    prior = GaussianProcess(lambda a, b: torch.exp(-2 * (a - b.T) ** 2))
    prior.observation_noise.fill_(NOISE)
    return prior


def network(outputs=1):
    """Two layers, the first of them with units steep enough for the prior."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, outputs))
    with torch.no_grad():
        net[0].weight.mul_(3.0)
        net[0].bias.mul_(4.0)
    return net


def regression(net, scale=NOISE, **kwargs):
    return SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=scale, **kwargs))


def widths(model, guide, at):
    return PosteriorProcess(model, guide.get_posterior()).marginals(at)[1].double().sqrt()


@pytest.mark.parametrize("times", [1, 3])
def test_a_linear_model_has_its_exact_posterior(times):
    torch.manual_seed(0)
    x = torch.randn(10, 3)
    model = regression(nn.Linear(3, 1), num_data=10 * times)
    prior = GaussianProcess(lambda a, b: 2.0 * (1.0 + a @ b.T))
    guide = function_space_laplace(model, nn.Linear(3, 1), (x, x[:, :1]), prior, torch.randn(7, 3))
    design = torch.cat([x, torch.ones(10, 1)], 1)
    exact = (times * design.T @ design / NOISE**2 + torch.eye(4) / 2.0).inverse()
    torch.testing.assert_close(guide.covariance(), exact, rtol=1e-3, atol=1e-3 * float(exact.diagonal().min()))
    mean = (times * exact @ design.T @ x[:, :1] / NOISE**2).flatten()
    found = torch.cat([value.flatten() for value in guide.median().values()])
    # What the prior may differ by moves the mean by less than a twentieth of its standard deviations.
    assert ((found - mean).abs() < 0.05 * exact.diagonal().sqrt()).all()


def test_a_network_never_trained_gets_the_exact_process_at_the_data_in_a_gap_and_beyond():
    model = regression(network())
    guide = function_space_laplace(model, network(), (X, Y), smooth(), POINTS)
    at = torch.linspace(-1.95, 1.95, 50)[:, None]
    mean, covariance = smooth().posterior(X, Y, at)
    stddev = covariance[0].diagonal().sqrt()[:, None]
    found, variance = PosteriorProcess(model, guide.get_posterior()).marginals(at)
    torch.testing.assert_close(variance.double().sqrt() / stddev, torch.ones_like(stddev), rtol=0.03, atol=0.0)
    assert ((found - mean).abs() < 0.1 * stddev).all()
    # Without steps it keeps the given means, here those of the first guide; its state loads into another.
    again = function_space_laplace(model, guide, (X, Y), smooth(), POINTS, num_steps=0)
    assert all(torch.equal(value, guide.median()[name]) for name, value in again.median().items())
    other = function_space_laplace(model, network(), (X, -Y), smooth(), POINTS, num_steps=0)
    other.load_state_dict(again.state_dict())
    assert torch.equal(other.covariance(), again.covariance())


def test_classes_are_at_the_mode_of_the_posterior_of_functions():
    x, y = torch.linspace(-1, 1, 6)[:, None], torch.tensor([0, 1, 2, 1, 1, 0])
    model = SupervisedModel(BayesianModule(network(outputs=3)), likelihoods.Categorical())
    prior = GaussianProcess(RBF(1, lengthscale=torch.tensor(0.5)))
    guide = function_space_laplace(model, network(outputs=3), (x, y), prior, x)
    f = PosteriorProcess(model, guide.get_posterior()).marginals(x)[0].double()
    # Rasmussen and Williams (2006), eq. 3.34, f = K (y - softmax(f)).
    gradient = nn.functional.one_hot(y, 3) - f.softmax(-1)
    torch.testing.assert_close(f, prior.moments(x)[1][0] @ gradient, rtol=0.0, atol=2e-3)


def test_classes_have_the_covariance_of_the_precisions_of_functions():
    net, x = network(outputs=3), torch.linspace(-1, 1, 4)[:, None]
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    prior = GaussianProcess(RBF(1, lengthscale=torch.tensor(0.5)))
    guide = function_space_laplace(model, net, (x, torch.tensor([0, 1, 2, 1])), prior, x, num_steps=0)
    hessian = output_hessian(model.likelihood, net(x).detach().double(), {})
    precision = torch.zeros(4, 3, 4, 3).double()
    precision[range(4), :, range(4)] = hessian
    kernel = torch.einsum("nm,op->nomp", prior.moments(x)[1][0], torch.eye(3).double()).reshape(12, 12)
    exact = (kernel.inverse() + precision.reshape(12, 12)).inverse().diagonal().reshape(4, 3)
    torch.testing.assert_close(widths(model, guide, x), exact.sqrt(), rtol=0.01, atol=0.0)


def test_predictions_are_those_of_the_linearized_network_and_draws_of_weights_have_their_covariance():
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
    model = regression(net)
    wide = GaussianProcess(lambda a, b: torch.exp(-0.01 * (a - b.T) ** 2))
    guide = function_space_laplace(model, net, (X, Y), wide, POINTS, num_steps=0)
    found = predict(model, guide, X, num_samples=1000, method="linearized").epistemic_variance
    torch.testing.assert_close(found, widths(model, guide, X).square().float(), rtol=5 * (2 / 1000) ** 0.5, atol=0.0)
    changes = []
    for noise in torch.eye(guide.factor.shape[1]):
        drawn = pyro.condition(guide, {"_weight_noise": noise})()
        changes.append(torch.cat([(drawn[name] - mean).flatten() for name, mean in guide.median().items()]))
    torch.testing.assert_close(torch.stack(changes).mT @ torch.stack(changes), guide.covariance(), rtol=1e-3, atol=1e-4)
    with pytest.warns(
        UserWarning, match="widths hold for the linearized network alone; predict with method='linearized'"
    ):
        predict(model, guide, X, num_samples=2)


def test_a_network_too_stiff_for_the_prior_is_named():
    rough = GaussianProcess(lambda a, b: torch.exp(-50 * (a - b.T) ** 2))
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    with pytest.warns(UserWarning, match=r"linearized network holds \d+ % of the prior's variance at the points"):
        function_space_laplace(regression(net), net, (X, Y), rough, POINTS, num_steps=0)


@pytest.mark.parametrize(
    ("prior", "arguments", "message"),
    [
        (GaussianProcess(lambda a, b: -torch.exp(-((a - b.T) ** 2))), {}, "kernel must be positive definite"),
        (ImplicitProcess(lambda x, n: torch.randn(n, len(x))), {}, "prior must have moments"),
        (smooth(), {"points": torch.zeros(20_000, 1)}, "points must be fewer, because the Jacobian of 20000 points"),
    ],
)
def test_a_prior_or_points_that_do_not_fit_are_refused(prior, arguments, message):
    net = network()
    with pytest.raises(ValueError, match=message):
        function_space_laplace(regression(net), net, (X, Y), prior, **{"points": POINTS, **arguments})


def test_weights_without_a_finite_density_are_refused():
    net = network()
    with torch.no_grad():
        net[4].bias.fill_(math.inf)
    with pytest.raises(FloatingPointError, match="trained must have weights with a finite log-likelihood"):
        function_space_laplace(regression(network()), net, (X, Y), smooth(), POINTS)
