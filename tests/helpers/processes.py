# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels, points and processes that several tests share."""

import pyro.contrib.gp.kernels as gp_kernels
import torch

from pyro_radial.functional import GaussianProcess

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
