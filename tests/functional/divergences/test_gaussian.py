# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL of sampled moments, against closed forms."""

import math

import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from scipy.special import digamma
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_radial.functional import GaussianKL, GaussianProcess, ImplicitProcess
from tests.helpers.functional import (
    NUM_POINTS,
    POINTS,
    NormalPrior,
    SampledPrior,
    assert_mean_is,
    draws,
    eye,
    normal_p,
    normal_q,
    white,
)


@pytest.mark.parametrize(
    ("count", "num_prior_samples"), [(NUM_POINTS + 1, None), (50, None), (30, 40), (100, 40), (30, 400)]
)
def test_gaussian_kl_is_unbiased(count, num_prior_samples):
    q, p = normal_q(), normal_p()
    prior = NormalPrior(p) if num_prior_samples is None else SampledPrior(p)
    divergence = GaussianKL(num_prior_samples=num_prior_samples or 1)
    values = [divergence(draws(q, count), POINTS, prior).value for _ in range(150)]
    assert_mean_is(values, kl_divergence(q, p))


def mean_log_det_of_wishart(count, dim):
    """Of the sampled covariance of so many standard normal draws."""
    degrees = count - 1
    return sum(digamma((degrees + 1 - i) / 2) for i in range(1, dim + 1)) + dim * math.log(2 / degrees)


@pytest.mark.parametrize(("count", "dim"), [(8, 1), (8, 2), (8, 7), (51, 12)])
def test_gaussian_kl_of_exact_moments_is_the_closed_form(count, dim):
    f, x = white(count, dim).unsqueeze(-1), torch.zeros(dim, 1, dtype=torch.double)
    p = MultivariateNormal(torch.ones(dim, dtype=torch.double), eye(dim, 2.0))
    wishart = mean_log_det_of_wishart(count, dim)
    expected = 0.5 * ((1 - 1 / count) * dim / 2 + dim / 2 - dim + dim * math.log(2) + wishart)
    assert float(GaussianKL()(f, x, NormalPrior(p)).value) == pytest.approx(expected, rel=1e-6)
    # The same moments, of draws: the inverse shrinks, the distance of means loses their spread.
    sampled = ImplicitProcess(lambda x, num_samples: 1 + 2**0.5 * white(num_samples, dim))
    expected += 0.5 * (-((dim + 1) / 39) * ((1 - 1 / count) * dim / 2 + dim / 2) - dim / 40)
    expected -= 0.5 * mean_log_det_of_wishart(40, dim)
    assert float(GaussianKL(num_prior_samples=40)(f, x, sampled).value) == pytest.approx(expected, rel=1e-6)


# Several outputs.


def mixed_outputs(q, count):
    """Two outputs with correlation 0.8, each distributed as q."""
    f = q.sample((count, 2))
    mixing = torch.tensor([[1.0, 0.0], [0.8, 0.6]], dtype=torch.double)
    return (q.mean + torch.einsum("po,son->spn", mixing, f - q.mean)).mT


def test_outputs_are_compared_jointly_unless_factorized():
    q, p = normal_q(), normal_p()
    joint = [GaussianKL()(mixed_outputs(q, 60), POINTS, NormalPrior(p)).value for _ in range(100)]
    information = -0.5 * NUM_POINTS * math.log(1 - 0.8**2)
    assert_mean_is(joint, 2 * kl_divergence(q, p) + information)
    # Each by itself is distributed as q; what one output knows of the other is left out.
    single = [GaussianKL(factorize=True)(mixed_outputs(q, 60), POINTS, NormalPrior(p)).value for _ in range(100)]
    assert_mean_is(single, 2 * kl_divergence(q, p))


@pytest.mark.parametrize("factorize", [False, True])
def test_outputs_with_priors_of_their_own_meet_them(factorize):
    kernels = [RBF(1, lengthscale=torch.tensor(0.3)), RBF(1, variance=torch.tensor(4.0))]
    prior, x = GaussianProcess(kernels, noise=0.2), torch.linspace(-1, 1, 4, dtype=torch.double).unsqueeze(-1)
    mean, covariance = prior.moments(x, 2)
    standard = MultivariateNormal(torch.zeros(4, dtype=torch.double), eye(4))
    truth = sum(kl_divergence(standard, MultivariateNormal(mean[:, o], covariance[o])) for o in range(2))
    f = torch.randn(100, 50, 4, 2, dtype=torch.double)
    assert_mean_is([GaussianKL(factorize=factorize)(values, x, prior).value for values in f], truth)
