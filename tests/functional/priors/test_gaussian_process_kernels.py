# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Kernels of Pyro, of gpytorch and of one's own."""

import math

import pyro
import pyro.contrib.gp.kernels as gp_kernels
import pytest
import torch

from pyro_radial.functional import GaussianProcess
from tests.helpers.functional import points, rbf, squared_exponential


def test_white_noise_among_pyros_kernels_is_on_the_diagonal():
    kernel = gp_kernels.Sum(rbf(), gp_kernels.WhiteNoise(2, variance=torch.tensor(0.25)))
    _, covariance = GaussianProcess(kernel).moments(points())
    torch.testing.assert_close(covariance[0].diagonal(), torch.full((6,), 1.95, dtype=torch.double))


def test_two_kernels_of_a_kind_do_not_share_parameters_and_leave_none_in_the_store():
    first, second = GaussianProcess(rbf(variance=2.0)), GaussianProcess(rbf(variance=5.0))
    x = points(2)
    assert float(first.moments(x)[1][0, 0, 0]) == pytest.approx(2.0)
    assert float(second.moments(x)[1][0, 0, 0]) == pytest.approx(5.0)
    assert len(pyro.get_param_store()) == 0


def test_gpytorch_kernels_serve_with_their_hyper_parameters_fitted():
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
    kernel.base_kernel.lengthscale, kernel.outputscale = torch.tensor([[0.6, 0.6]]), 1.7
    x, f = points(), torch.randn(3, 6, 1, dtype=torch.double)
    prior, same = GaussianProcess(kernel, noise=0.1), GaussianProcess(squared_exponential, noise=0.1)
    torch.testing.assert_close(prior.moments(x), same.moments(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prior.score(f, x), same.score(f, x), rtol=1e-5, atol=1e-5)
    history = prior.fit(points(30), torch.randn(30), steps=20)
    assert float(history[-1]) > float(history[0])
    assert float(kernel.outputscale.detach()) == pytest.approx(1.7)


def indefinite(x1, x2):
    return -squared_exponential(x1, x2)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (indefinite, "kernel must be positive definite"),
        (lambda x1, x2: squared_exponential(x1, x2) * math.nan, "kernel must give finite covariances, got NaN"),
        (lambda x1, x2: x1[:, :1] + 2 * x2[:, 0], "kernel must be symmetric"),
        (lambda x1, x2: x1.sum(-1), r"kernel must return \[6, 6\]"),
        (lambda x1, x2: x1 @ x2, r"kernel must take points of shape \[6, 2\]"),
    ],
)
def test_a_kernel_that_is_none_is_refused_by_name(kernel, words):
    with pytest.raises(ValueError, match=words):
        GaussianProcess(kernel).sample(points(), 2)


def test_a_mean_of_another_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"mean must return \[6\] or \[6, 1\]"):
        GaussianProcess(squared_exponential, mean=lambda x: x).moments(points())
