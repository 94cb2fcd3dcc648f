# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Moments, draws, densities and posteriors of Gaussian processes, against torch and scikit-learn."""

import copy
import pickle

import numpy as np
import pyro.contrib.gp.kernels as gp_kernels
import pyro.distributions as dist
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

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
