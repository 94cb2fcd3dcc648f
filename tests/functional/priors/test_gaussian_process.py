# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Moments, draws, densities, posteriors and fits of Gaussian processes, against torch and scikit-learn."""

import copy
import math
import pickle

import numpy as np
import pyro
import pyro.contrib.gp.kernels as gp_kernels
import pyro.distributions as dist
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from torch import nn

from pyro_radial.functional import GaussianProcess
from tests.helpers.functional import NUM_SAMPLES, points, rbf, squared_exponential


def test_moments_are_those_of_the_kernel_and_the_mean_with_the_noise():
    x = points()
    prior = GaussianProcess(squared_exponential, mean=lambda x: x[:, 0], noise=0.3)
    mean, covariance = prior.moments(x, num_outputs=2)
    torch.testing.assert_close(mean, x[:, :1].expand(-1, 2))
    expected = squared_exponential(x, x) + 0.09 * torch.eye(6, dtype=torch.double)
    torch.testing.assert_close(covariance, expected.expand(2, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
def test_draws_have_the_moments_with_errors_as_large_as_their_number_allows(dtype):
    x = points(dtype=dtype)
    prior = GaussianProcess(squared_exponential, mean=0.7, noise=0.2)
    f = prior.sample(x, NUM_SAMPLES, num_outputs=2)
    assert f.shape == (NUM_SAMPLES, 6, 2)
    assert f.dtype == dtype
    mean, covariance = prior.moments(x, num_outputs=2)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert bool(((f.double().mean(0) - mean).abs() < 5 * (variance.mT / NUM_SAMPLES).sqrt()).all())
    joint = torch.cov(f.double().permute(2, 1, 0).reshape(12, -1))
    # Outputs are independent: the blocks between them are zero.
    expected = torch.block_diag(*covariance)
    spread = expected.diagonal()
    standard_error = ((spread[:, None] * spread + expected.square()) / NUM_SAMPLES).sqrt()
    assert bool(((joint - expected).abs() < 5 * standard_error).all())


def test_the_density_is_that_of_a_multivariate_normal_jointly_over_outputs():
    x, f = points(), torch.randn(4, 6, 3, dtype=torch.double)
    prior = GaussianProcess(squared_exponential, mean=0.4, noise=0.5)
    mean, covariance = prior.moments(x)
    distribution = dist.MultivariateNormal(mean[:, 0], covariance[0])
    torch.testing.assert_close(prior.log_prob(f, x), distribution.log_prob(f.mT).sum(-1), rtol=1e-6, atol=1e-6)


def test_a_list_of_kernels_gives_each_output_its_own_distribution():
    x, f = points(), torch.randn(4, 6, 2, dtype=torch.double)
    wide, narrow = rbf(lengthscale=2.0), rbf(lengthscale=0.2)
    both = GaussianProcess([wide, narrow], noise=0.1)
    alone = [GaussianProcess(kernel, noise=0.1) for kernel in (wide, narrow)]
    for o, prior in enumerate(alone):
        torch.testing.assert_close(both.moments(x, 2)[1][o], prior.moments(x)[1][0])
        torch.testing.assert_close(both.score(f, x)[..., o : o + 1], prior.score(f[..., o : o + 1], x))
    total = sum(prior.log_prob(f[..., o : o + 1], x) for o, prior in enumerate(alone))
    torch.testing.assert_close(both.log_prob(f, x), total)
    assert both.sample(x, 3, num_outputs=2).shape == (3, 6, 2)
    with pytest.raises(ValueError, match=r"num_outputs must be 2, .* got 1"):
        both.moments(x)


def test_the_score_of_a_nearly_singular_distribution_is_accurate_in_single_precision():
    # Forty points of a smooth kernel: the covariance has a condition number of about 1e10 before the noise.
    x = torch.linspace(-1, 1, 40).unsqueeze(-1)
    prior = GaussianProcess(rbf(input_dim=1), noise=0.01)
    f = prior.sample(x.double(), 8)
    exact = prior.score(f, x)
    rounded = prior.score(f.float(), x)
    assert rounded.dtype == torch.float32
    # Stein's identity, E[f score(f)] = -1, is the scale to measure against.
    assert float((rounded - exact).abs().max()) < 1e-3 * float(exact.abs().max())


def test_a_copy_is_independent_and_pickles_and_state_dicts_restore_a_fitted_prior():
    x, y = points(20), torch.randn(20)
    prior = GaussianProcess(rbf())
    other = copy.deepcopy(prior)
    prior.fit(x, y, steps=5)
    assert float(other.observation_noise) == 0.0
    assert not torch.equal(other.moments(x)[1], prior.moments(x)[1])
    other.load_state_dict(prior.state_dict())
    unpickled = pickle.loads(pickle.dumps(prior))
    for restored in (other, unpickled):
        assert torch.equal(restored.log_marginal_likelihood(x, y), prior.log_marginal_likelihood(x, y))


def test_the_marginal_likelihood_is_that_of_scikit_learn():
    x, y = np.random.default_rng(0).normal(size=(30, 2)), np.random.default_rng(1).normal(size=30)
    reference = ConstantKernel(1.7) * SklearnRBF(0.6) + WhiteKernel(0.2**2)
    expected = GaussianProcessRegressor(reference, optimizer=None, alpha=0.0).fit(x, y).log_marginal_likelihood_value_
    prior = GaussianProcess(squared_exponential)
    prior.observation_noise.fill_(0.2)
    value = prior.log_marginal_likelihood(torch.from_numpy(x), torch.from_numpy(y))
    assert float(value) == pytest.approx(expected, rel=1e-6)


def test_the_posterior_is_that_of_scikit_learn():
    x, y, at = torch.rand(15, 2).double(), torch.randn(15, 2).double(), torch.rand(6, 2).double()
    prior = GaussianProcess(gp_kernels.RBF(2, variance=torch.tensor(1.7), lengthscale=torch.tensor(0.6)), noise=0.5)
    prior.observation_noise.fill_(0.3)
    kernel = ConstantKernel(float(prior.kernel.variance)) * SklearnRBF(float(prior.kernel.lengthscale))
    reference = GaussianProcessRegressor(kernel, alpha=0.09, optimizer=None).fit(x, y)
    mean, covariance = reference.predict(at, return_cov=True)
    found = prior.posterior(x, y, at)
    np.testing.assert_allclose(found[0], mean, atol=1e-6)
    # The last dim of the reference's is the output's.
    np.testing.assert_allclose(found[1].permute(1, 2, 0), covariance, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda prior: prior.sample(torch.zeros(3, 2, dtype=torch.cfloat), 2), "x must be a tensor of floating"),
        (lambda prior: prior.fit(torch.zeros(3, 2), torch.zeros(3)), "kernel must have parameters"),
    ],
)
def test_points_and_values_that_do_not_fit_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call(GaussianProcess(squared_exponential))


@pytest.mark.cuda
def test_on_cuda_moments_and_scores_are_those_of_the_cpu():
    x, f = points(), torch.randn(3, 6, 1, dtype=torch.double)
    prior = GaussianProcess(rbf(), noise=0.1)
    expected = prior.score(f, x)
    prior.cuda()
    assert prior.sample(x.cuda(), 2).is_cuda
    torch.testing.assert_close(prior.score(f.cuda(), x.cuda()).cpu(), expected)


# Kernels of Pyro, of gpytorch and of one's own.


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


# Fitted by the marginal likelihood.


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
