# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where means and widths are at rest: the best posterior of each family, in closed form and by quadrature."""

import math
from functools import partial
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch import nn
from torch.distributions import transform_to
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_radial import AutoMeanField, AutoRadial, TermsELBO
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.autoguide.per_site import LocScaleSite

DOUBLE = torch.float64
GUIDES = {
    "normal": AutoMeanField,
    "radial": AutoRadial,
    "a radius for each row": partial(AutoRadial, event_dim=1),
    "normal, one scale": partial(AutoMeanField, families={"": families.Normal(shared_scale=True)}),
    "radial, one scale": partial(AutoMeanField, families={"": families.Radial(shared_scale=True)}),
}


@pytest.fixture
def double():
    torch.set_default_dtype(DOUBLE)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def regression(rows=40, inputs=(2, 2), noise=1.0):
    """Linear regression with known noise, its data, the exact mean and the diagonal of the exact precision."""
    size = math.prod(inputs)
    x = torch.randn(rows, size)
    y = x @ torch.randn(size) + noise * torch.randn(rows)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.3, 0.8).expand(inputs).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal((w.flatten(-2) * x).sum(-1), noise), obs=y)

    precision = x.T @ x / noise**2 + torch.eye(size) / 0.8**2
    mean = torch.linalg.solve(precision, x.T @ y / noise**2 + 0.3 / 0.8**2)
    return model, (x, y), mean.reshape(inputs), precision.diagonal().reshape(inputs)


def train(model, guide, data, steps=300, particles=1000):
    """The averages of mean and precision over the last third of a training, in which the rate falls to zero."""
    elbo = TermsELBO(particles, vectorize_particles=True, max_plate_nesting=1)(model, guide)
    elbo(*data)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, steps)
    moments = []
    for step in range(steps):
        optimizer.zero_grad()
        elbo(*data).backward()
        optimizer.step()
        scheduler.step()
        if step >= steps * 2 // 3:
            posterior = guide.posterior()["w"]
            moments.append(torch.stack([posterior.mean, posterior.variance.reciprocal()]))
    return torch.stack(moments).mean(0)


@pytest.mark.parametrize("kind", GUIDES)
def test_linear_regression_rests_at_the_exact_mean_and_the_diagonal_of_the_precision(double, kind):
    """The loss is quadratic in the weights, so the radial posterior has the same best variances.

    One scale for all D weights has the variance D / trace(precision).
    """
    model, data, mean, precision = regression()
    if kind.endswith("one scale"):
        precision = precision.mean().expand_as(precision)
    means, precisions = train(model, GUIDES[kind](model), data)
    assert bool(((means - mean).abs() < 0.025 * precision.rsqrt()).all())
    torch.testing.assert_close(precisions, precision, rtol=0.025, atol=0.0)


def logistic(x, y):
    """Logistic regression with two weights and a Student-t prior, which is no normal."""

    def model(x, y=None):
        w = pyro.sample("w", dist.StudentT(3.0, 0.2, 0.5).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Bernoulli(logits=(w * x).sum(-1)), obs=y)

    return model


def nodes(kind):
    """Noise of unit variance in the plane and its weights: a product of Gauss-Hermite rules, or angles and radii."""
    import numpy as np

    points, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(40))
    weights = weights / weights.sum()
    if kind == "normal":
        return torch.cartesian_prod(points, points), torch.outer(weights, weights).flatten()
    # The rule is even, so a signed radius and half a turn are a half-normal radius and a whole one.
    angles = torch.arange(64) * (math.pi / 64)
    units = torch.stack([angles.cos(), angles.sin()], -1)
    noise = math.sqrt(2.0) * points[:, None, None] * units
    return noise.reshape(-1, 2), weights.repeat_interleave(64) / 64


def best_logistic(x, y, kind):
    """The best mean and marginal precision for :func:`logistic`, by quadrature."""
    noise, weights = nodes(kind)
    best = torch.tensor([0.0, 0.0, -1.0, -1.0], requires_grad=True)
    optimizer = torch.optim.LBFGS([best], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        w = best[:2] + best[2:].exp() * noise
        logits = w @ x.T
        nll = nn.functional.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none").sum(-1)
        value = weights @ (nll - dist.StudentT(3.0, 0.2, 0.5).log_prob(w).sum(-1)) - best[2:].sum()
        value.backward()
        return value

    optimizer.step(loss)
    return best.detach()[:2], (-2 * best.detach()[2:]).exp()


@pytest.mark.parametrize("kind", ["normal", "radial"])
def test_a_prior_of_another_family_leads_to_the_best_posterior_by_quadrature(double, kind):
    x = torch.randn(12, 2)
    y = (x @ torch.tensor([1.0, -0.5]) + torch.randn(12) > 0).double()
    mean, precision = best_logistic(x, y, kind)
    model = logistic(x, y)
    guide = GUIDES[kind](model, init_stddev=1.0)
    means, precisions = train(model, guide, (x, y))
    assert bool(((means - mean).abs() < 0.03 * precision.rsqrt()).all())
    torch.testing.assert_close(precisions, precision, rtol=0.03, atol=0.0)


@pytest.mark.parametrize("constraint", [constraints.softplus_positive, constraints.positive])
def test_the_derivative_by_the_logarithm_of_scales_is_that_of_automatic_differentiation(
    double, constraint, monkeypatch
):
    to_scale, x = transform_to(constraint), torch.linspace(-30.0, 30.0, 13, requires_grad=True)
    scale = to_scale(x)
    slope = torch.autograd.grad(scale.sum(), x)[0]
    if constraint is constraints.softplus_positive:
        # By way of the density it takes two functions more, for each weight.
        monkeypatch.delattr(type(to_scale), "log_abs_det_jacobian")
    site = LocScaleSite(SimpleNamespace(scale_constraint=constraint), None, loc=None, scale=x)
    computed_scale, by_log_scale = site.constrained_scale()
    torch.testing.assert_close(computed_scale, scale)
    torch.testing.assert_close(by_log_scale, scale / slope)
