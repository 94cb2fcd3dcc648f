# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The spectral estimator of the experiment on score estimators."""

import torch

from benchmarks.functional._spectral import SpectralSteinScore
from tests.helpers.functions import white


def gaussian_kernel(z, draws):
    return (-0.5 * torch.cdist(z, draws).square() / torch.pdist(draws).median() ** 2).exp()


def test_spectral_is_the_expansion_in_the_eigenfunctions_that_reach_the_threshold():
    draws, at = white(30, 2), torch.randn(5, 2, dtype=torch.double)
    width, eta = torch.pdist(draws).median(), 0.01 * 30
    eigenvalues, vectors = torch.linalg.eigh(gaussian_kernel(draws, draws))
    share = eigenvalues.flip(0).cumsum(0) / eigenvalues.sum()
    for count in (1, 4, 9):
        expected = torch.zeros(5, 2, dtype=torch.double)
        for j in range(1, count + 1):

            def function(z, j=j):
                kernel = (-0.5 * (z[:, None] - draws).square().sum(-1) / width**2).exp()
                return 30**0.5 / (eigenvalues[-j] + eta) * kernel @ vectors[:, -j]

            x = draws.clone().requires_grad_()
            coefficient = -torch.autograd.grad(function(x).mean(), x)[0].sum(0)
            expected += function(at)[:, None] * coefficient
        threshold = float(share[count - 1]) - 1e-6  # the eigenvalue that crosses it is kept
        score = SpectralSteinScore(threshold, ridge=0.01)(draws, at)
        torch.testing.assert_close(score, expected, rtol=1e-6, atol=1e-6)


def test_spectral_at_the_draws_is_spectral_anywhere():
    draws = torch.randn(40, 3, dtype=torch.double)
    torch.testing.assert_close(SpectralSteinScore()(draws), SpectralSteinScore()(draws, draws.clone()))
