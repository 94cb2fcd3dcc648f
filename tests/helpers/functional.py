# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels, processes, draws with known moments, and divergences between normal distributions."""

import pyro.contrib.gp.kernels as gp_kernels
import torch
from torch.distributions import MultivariateNormal

from pyro_radial.functional import FunctionPrior, GaussianProcess

NUM_POINTS = 12
POINTS = torch.linspace(-1, 1, NUM_POINTS, dtype=torch.double).unsqueeze(-1)


class NormalPrior(FunctionPrior):
    """A normal distribution of values at given points, with the same mean and covariance for each output."""

    def __init__(self, distribution):
        super().__init__()
        self.distribution = distribution

    def moments(self, x, num_outputs=1):
        covariance = self.distribution.covariance_matrix
        return self.distribution.mean.unsqueeze(-1).expand(-1, num_outputs), covariance.expand(num_outputs, -1, -1)

    def score(self, f, x):
        residual = f - self.distribution.mean.unsqueeze(-1)
        return -torch.einsum("nm,smo->sno", self.distribution.precision_matrix, residual)


class SampledPrior(FunctionPrior):
    """The same distribution, known by its draws alone."""

    def __init__(self, distribution):
        super().__init__()
        self.distribution = distribution

    def _sample(self, x, num_samples, num_outputs):
        return self.distribution.sample((num_samples, num_outputs)).mT


def kernel(length, scale=1.0):
    return scale * (-0.5 * ((POINTS - POINTS.mT) / length).square()).exp()


def eye(size, scale=1.0):
    return scale * torch.eye(size, dtype=torch.double)


def normal_q():
    return MultivariateNormal((3 * POINTS[:, 0]).sin() / 2, kernel(0.3, 0.3) + eye(NUM_POINTS, 0.05))


def normal_p():
    return MultivariateNormal(0.1 * POINTS[:, 0], kernel(0.5) + eye(NUM_POINTS, 0.01))


def draws(distribution, count):
    return distribution.sample((count,)).unsqueeze(-1)


def assert_mean_is(estimates, truth, slack=0.0):
    """Within four standard errors, and a bias that is known."""
    estimates = torch.stack(estimates)
    error = (estimates.mean(0) - truth).abs()
    assert bool((error <= 4.0 * estimates.std(0) / len(estimates) ** 0.5 + slack).all())


def white(count, dim):
    """Draws whose mean is zero and covariance one, exactly."""
    values = torch.randn(count, dim, dtype=torch.double)
    values -= values.mean(0)
    return values @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(values.mT).reshape(dim, dim))).mT


NUM_SAMPLES = 20_000


def squared_exponential(x1, x2):
    return 1.7 * (-0.5 * torch.cdist(x1, x2, compute_mode="donot_use_mm_for_euclid_dist").square() / 0.6**2).exp()


def rbf(lengthscale=0.6, variance=1.7, input_dim=2):
    return gp_kernels.RBF(input_dim, variance=torch.tensor(variance), lengthscale=torch.tensor(lengthscale))


def points(number=6, dtype=torch.double):
    return torch.randn(number, 2, dtype=dtype)


def column(*values):
    return torch.tensor(values, dtype=torch.double).unsqueeze(-1)


def gaussian_process(lengthscale=1.0, mean=0.0):
    return GaussianProcess(gp_kernels.RBF(1, lengthscale=torch.tensor(lengthscale)), mean=mean, noise=0.3)
