# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Conjugate updates of a linear model, and its draws."""

import torch

from benchmarks.decisions._policies import LinearModel


def test_updates_one_by_one_are_one_of_all():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3).double(), torch.randn(20).double()
    prior = LinearModel.prior(3, 0.25, 6.0, 6.0)
    at_once = prior.updated(x, y)
    step_by_step = prior
    for row in range(20):
        step_by_step = step_by_step.updated(x[row : row + 1], y[row : row + 1])
    for one, other in zip(at_once, step_by_step, strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def test_the_posterior_is_that_of_quadrature():
    # One weight: the marginal posterior of weight and variance on a grid.
    x, y = torch.tensor([[1.0], [2.0], [-0.5]]).double(), torch.tensor([0.8, 2.5, 0.1]).double()
    model = LinearModel.prior(1, 0.25, 3.0, 2.0).updated(x, y)
    w = torch.linspace(-4, 6, 2001).double()[:, None]
    variance = torch.logspace(-2, 2.5, 2001, base=10.0).double()
    normal = torch.distributions.Normal
    log_p = (
        torch.distributions.InverseGamma(3.0, 2.0).log_prob(variance)
        + normal(0.0, (variance / 0.25).sqrt()).log_prob(w)
        + sum(normal(w * a, variance.sqrt()).log_prob(b) for a, b in zip(x[:, 0], y, strict=True))
        + variance.log()  # The grid is even in the logarithm.
    )
    p = (log_p - log_p.max()).exp()
    p = p / p.sum()
    assert torch.allclose((p * w).sum(), model.mean[0], rtol=1e-4)
    mean_variance = model.rate / (model.shape - 1)
    assert torch.allclose((p * variance).sum(), mean_variance, rtol=1e-3)
    spread = (p * (w - model.mean).square()).sum()
    assert torch.allclose(spread, mean_variance / model.precision[0, 0], rtol=1e-3)
