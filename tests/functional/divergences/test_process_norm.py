# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The squared norm of a mean function: a log-density, with the exact posterior mean as its minimum."""

import pyro
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.functional import GaussianProcess, RKHSNorm
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.nn import likelihoods


def test_it_is_the_negative_log_density_of_the_mean_but_for_a_constant():
    x = torch.linspace(-1, 1, 5)[:, None]
    prior = GaussianProcess(lambda a, b: torch.exp(-((a - b.T) ** 2)), mean=0.3, noise=0.1)
    first, second = (GaussianProcess(lambda a, b: 1.0 + a @ b.T, mean=m) for m in (torch.sin, torch.cos))
    values = [float(RKHSNorm()(process, x, prior).value) for process in (first, second)]
    exact = [float(-prior.log_prob(m(x)[None].double(), x)) for m in (torch.sin, torch.cos)]
    assert abs(values[0] - values[1] - (exact[0] - exact[1])) < 1e-4 * abs(values[0])


def test_the_loss_of_points_is_stationary_at_the_exact_posterior_mean():
    torch.manual_seed(0)
    x, noise = torch.randn(8, 3), 0.5
    y = torch.randn(8, 1)
    design = torch.cat([x, torch.ones(8, 1)], 1)
    mean = torch.linalg.solve(design.T @ design / noise**2 + torch.eye(4), design.T @ y / noise**2)
    model = SupervisedModel(BayesianModule(nn.Linear(3, 1)), likelihoods.Gaussian(scale=noise))
    guide = AutoMeanField(model, families={".": Delta()})
    guide.setup(x, y)
    points = torch.cat([torch.eye(3), torch.zeros(1, 3)])
    prior = GaussianProcess(lambda a, b: 1.0 + a @ b.T)
    settings = {"divergence": RKHSNorm(), "compare_at": "measurement_points", "num_functions": 1}
    elbo = FunctionalELBO(prior, lambda x: points, **settings)(model, guide)
    sizes = []
    for shift in (0.0, 0.1):
        guide.load_means({"weight": mean[:3].T + shift, "bias": mean[3]})
        pyro.set_rng_seed(0)
        found = torch.autograd.grad(elbo(x, y), list(guide.parameters()))
        sizes.append(max(float(part.abs().max()) for part in found))
    assert sizes[0] < 1e-3 < 1.0 < sizes[1]
