# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Processes fitted by their marginal likelihood."""

import math

import numpy as np
import pyro.contrib.gp.kernels as gp_kernels
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from torch import nn

from pyro_radial.functional import GaussianProcess
from tests.helpers.functional import rbf


def test_fit_finds_the_maximum_that_scikit_learn_finds():
    x = torch.linspace(-4, 4, 80, dtype=torch.double).unsqueeze(-1)
    truth = GaussianProcess(rbf(lengthscale=0.7, variance=2.0, input_dim=1))
    y = truth.sample(x, 1)[0, :, 0] + 0.3 * torch.randn(80, dtype=torch.double)
    reference = GaussianProcessRegressor(ConstantKernel() * SklearnRBF() + WhiteKernel(), alpha=0.0).fit(x, y)
    prior = GaussianProcess(gp_kernels.RBF(1))
    history = prior.fit(x, y)
    best = reference.log_marginal_likelihood_value_ / 80
    assert history.dim() == 1
    assert float(history[0]) < best - 0.05
    assert float(history[-1]) == pytest.approx(best, abs=1e-4)
    variance, lengthscale, noise = np.exp(reference.kernel_.theta)
    assert float(prior.kernel.variance) == pytest.approx(variance, rel=0.02)
    assert float(prior.kernel.lengthscale) == pytest.approx(lengthscale, rel=0.02)
    assert float(prior.observation_noise) == pytest.approx(math.sqrt(noise), rel=0.02)
    # And the maximum is near the truth, as far as eighty points tell.
    assert float(prior.kernel.lengthscale) == pytest.approx(0.7, rel=0.3)
    assert float(prior.observation_noise) == pytest.approx(0.3, rel=0.3)


def test_fit_sums_over_outputs_and_trains_a_mean_and_keeps_what_is_frozen():
    x = torch.linspace(-3, 3, 40, dtype=torch.double).unsqueeze(-1)
    y = torch.stack([2 * x[:, 0] + 1, 2 * x[:, 0] + 1], -1) + 0.1 * torch.randn(40, 2, dtype=torch.double)
    kernel = gp_kernels.RBF(1)
    kernel.lengthscale_unconstrained.requires_grad_(False)
    line = nn.Linear(1, 1)
    prior = GaussianProcess(kernel, mean=line)
    prior.fit(x, y)
    assert float(prior.kernel.lengthscale) == 1.0
    assert float(prior.mean.weight) == pytest.approx(2.0, abs=0.1)
    assert not any(parameter.requires_grad for parameter in prior.parameters())
    assert line.weight.requires_grad


def test_known_noise_stays_and_the_kernel_is_fitted_to_it():
    x = torch.linspace(-3, 3, 60, dtype=torch.double).unsqueeze(-1)
    y = x.sin() + 0.1 * torch.randn(60, 1, dtype=torch.double)
    prior = GaussianProcess(gp_kernels.RBF(1, lengthscale=torch.tensor(0.05)))
    prior.fit(x, y, observation_noise=0.1)
    torch.testing.assert_close(prior.observation_noise, torch.tensor(0.1, dtype=torch.double))
    # From a length so short that the function could pass for noise.
    assert float(prior.kernel.lengthscale) > 0.5


def test_a_step_to_a_kernel_beyond_floating_point_is_shortened():
    class Overflowing(nn.Module):
        """An RBF kernel that is not positive definite at its second evaluation, as after a step too long."""

        def __init__(self):
            super().__init__()
            self.log_length, self.calls = nn.Parameter(torch.zeros(())), 0

        def forward(self, a, b):
            self.calls += 1
            sign = -1.0 if self.calls == 2 else 1.0
            return sign * torch.exp(-0.5 * ((a - b.T) / self.log_length.exp()) ** 2)

    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 40)[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1)
    first, second = (GaussianProcess(Overflowing()) for _ in range(2))
    first.kernel.calls = 2  # Does not overflow.
    expected, found = first.fit(x, y), second.fit(x, y)
    assert len(found) == second.kernel.calls - 1
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-4, atol=0.0)
