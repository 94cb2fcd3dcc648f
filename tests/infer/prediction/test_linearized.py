# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Predictions of the linearized network: draws with the outputs' joint moments, and clear errors."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.autograd.functional import jacobian

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods
from pyro_radial.nn.linearized.site_function import SiteFunction
from pyro_radial.poutine import mean_only
from tests.helpers.predictions import CLASSES, POINTS, X, problem

DRAWS = 2000
IMAGES = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(2))


def linearized(model, guide, x=X, seed=7, **kwargs):
    pyro.set_rng_seed(seed)
    return predict(model, guide, x, **{"num_samples": DRAWS, "method": "linearized", **kwargs})


def check_moments(samples, mean, covariance):
    """Draws ``[S, N, O]`` have these moments, to 4.5 standard errors of each."""
    assert samples.shape[1:] == mean.shape
    centered = samples - mean
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    number = len(samples)
    rounding = 1e-4 * variance.max()
    assert bool((centered.mean(0).abs() < 4.5 * (variance / number).sqrt() + rounding).all())
    found = torch.einsum("sno,snp->nop", centered, centered) / number
    error = ((variance.unsqueeze(-1) * variance.unsqueeze(-2) + covariance.square()) / number).sqrt()
    assert bool(((found - covariance).abs() < 4.5 * error + rounding).all())


def dense(model, guide, x):
    """The moments from the Jacobian of the whole function in all sites."""
    posterior = guide.posterior()
    means = tuple(distribution.mean for distribution in posterior.values())
    model.eval()

    def function(*values):
        return SiteFunction(model)(dict(zip(posterior, values, strict=True)), x)

    covariance = 0.0
    for distribution, by_site in zip(posterior.values(), jacobian(function, means), strict=True):
        rows = by_site.flatten(2)
        covariance = covariance + (rows * distribution.variance.flatten()) @ rows.mT
    return function(*means).detach(), covariance


# -------------------------------------------------------------------------------------------------------- the moments


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_a_model_linear_in_its_weights_has_the_moments_of_its_closed_form(guide_type):
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, CLASSES))
    model = SupervisedModel(BayesianModule(net, select=r"^0\."), likelihoods.Categorical(num_data=POINTS))
    guide = guide_type(model, init_stddev=0.5)
    guide.setup(X, torch.zeros(POINTS, dtype=torch.long))
    weight, bias = (guide.posterior()[site] for site in ("0.weight", "0.bias"))
    hidden = X @ weight.mean.mT + bias.mean
    spread = X.square() @ weight.variance.mT + bias.variance
    last = net[1].weight.detach()
    covariance = (last * spread.unsqueeze(1)) @ last.mT
    check_moments(linearized(model, guide).samples, hidden @ last.mT + net[1].bias.detach(), covariance)
    # What they approximate: for this model the same moments, with draws of the weights.
    check_moments(linearized(model, guide, method="draws").samples, net[1](hidden).detach(), covariance)


def perceptron(bias=True):
    return nn.Sequential(nn.Linear(2, 6, bias=bias), nn.Tanh(), nn.Linear(6, CLASSES, bias=bias))


def images():
    conv = nn.Conv2d(1, 3, 3)
    return nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES))


def directions():
    prior = {"0.weight": HypersphericalUniform(2).expand([6]).to_event(1), "2.weight": dist.Normal(0.0, 1.0)}
    return BayesianModule(perceptron(bias=False), prior)


def bottleneck():
    return BayesianModule(nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, CLASSES)), select=r"^0\.")


NETWORKS = {
    "radial by row": (perceptron, AutoRadial, {"event_dim": 1}),
    "images": (images, AutoRadial, {}),
    "images, point biases": (images, AutoMeanField, {"families": {"bias": families.Delta()}}),
    "directions, linearized inside the sphere": (
        directions,
        AutoMeanField,
        {"families": {"0.weight": families.VonMisesFisher()}},
    ),
    "one random number that moves three outputs": (bottleneck, AutoMeanField, {}),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_draws_have_the_joint_moments_of_the_jacobian(kind):
    make, guide_type, options = NETWORKS[kind]
    pyro.set_rng_seed(3)
    bnn = make() if make in (directions, bottleneck) else BayesianModule(make())
    # At zero the weight of the bottleneck does not matter.
    x = IMAGES if make is images else torch.cat([X, torch.zeros(1, 2)])
    model = SupervisedModel(bnn, likelihoods.Categorical(num_data=POINTS))
    guide = guide_type(model, init_stddev=0.3, **options)
    guide.setup(x[:POINTS], torch.zeros(len(x[:POINTS]), dtype=torch.long))
    samples = linearized(model, guide, x).samples
    check_moments(samples, *dense(model, guide, x))
    if make is bottleneck:
        assert float(samples[:, -1].var(0).max()) < 1e-12
    if make is directions:
        assert float(guide.posterior()["0.weight"].mean.norm(dim=-1).max()) < 0.95


def test_the_probit_needs_no_draws():
    model, guide = problem(net=perceptron())
    mean, covariance = dense(model, guide, X)
    prediction = predict(model, guide, X, method="probit", chunk_size=3)
    scaled = mean / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(prediction.samples, scaled[None].to(prediction.samples), rtol=1e-4, atol=1e-5)
    assert float(prediction.mutual_information.abs().max()) == 0.0


# ------------------------------------------------------------------------------------------------------------- errors


def is_refused(match, model=None, guide=None, x=X, **kwargs):
    own_model, own_guide = problem()
    with pytest.raises(ValueError, match=match):
        linearized(model or own_model, guide or own_guide, x, **kwargs)


def test_arguments_that_do_not_fit_are_named():
    is_refused(
        "model must have a likelihood of classes for method='probit', got Gaussian",
        SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(scale=0.1)),
        method="probit",
    )
    is_refused(r"dropout must be False for method='linearized', got True", dropout=True)
    is_refused(r"x must be one tensor for method='linearized', got a dict", x={"x": X})
    is_refused(r"x must be one tensor for method='linearized', got a tuple", x=(X, X))
    is_refused(r"function_site must be a site of the model, got 'g'", function_site="g")


def test_guides_without_moments_are_named():
    model, guide = problem()
    samples = {name: value.unsqueeze(0) for name, value in guide(X).items()}
    is_refused(r"guide must be a guide for method='linearized', got samples", guide=samples)
    normal = AutoNormal(model)
    normal(X, torch.zeros(POINTS, dtype=torch.long))
    is_refused(r"guide must have a method posterior\(\) for method='linearized'.*got AutoNormal", model, normal)
    is_refused(r"guide must have a method posterior\(\)", model, mean_only(guide))
    is_refused(r"guide must have its parameters", model, AutoRadial(model))
    points = AutoMeanField(model, families={".": families.Delta()})
    points.setup(X, torch.zeros(POINTS, dtype=torch.long))
    is_refused(r"guide: posterior must have variances, got a point", model, points)
