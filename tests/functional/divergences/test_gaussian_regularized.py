# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0


import pytest
import torch
from torch.distributions import kl_divergence

from pyro_radial.functional import GaussianKL, RegularizedKL
from tests.helpers.divergences import (
    NUM_POINTS,
    POINTS,
    NormalPrior,
    SampledPrior,
    assert_mean_is,
    draws,
    normal_p,
    normal_q,
    with_noise,
)


@pytest.mark.parametrize("prior", [NormalPrior, SampledPrior])
@pytest.mark.parametrize("gamma", [1e-4, 1e-2, 1.0])
def test_regularized_kl_is_that_of_distributions_with_noise(gamma, prior):
    q, p = normal_q(), normal_p()
    truth = kl_divergence(*(with_noise(distribution, gamma * NUM_POINTS) for distribution in (q, p)))
    divergence = RegularizedKL(gamma, num_prior_samples=300)
    values = [divergence(draws(q, 100), POINTS, prior(p)).value for _ in range(100)]
    # What is left of the bias is of the second order of one over the number of draws.
    assert_mean_is(values, truth, slack=0.01 * float(truth))


@pytest.mark.parametrize("prior", [NormalPrior, SampledPrior])
def test_regularized_kl_tends_to_gaussian_kl(prior):
    f, p = draws(normal_q(), 50), normal_p()
    torch.manual_seed(1)
    expected = GaussianKL()(f, POINTS, prior(p)).value
    torch.manual_seed(1)
    torch.testing.assert_close(RegularizedKL(1e-11)(f, POINTS, prior(p)).value, expected, rtol=1e-5, atol=0)


def test_regularized_kl_is_finite_where_the_divergence_is_not():
    lines = torch.randn(50, 1, 1, dtype=torch.double, requires_grad=True)
    f, prior = lines * POINTS, NormalPrior(normal_p())
    with pytest.raises(ValueError, match=r"f must not have a singular covariance.*RegularizedKL"):
        GaussianKL()(f, POINTS, prior)
    estimate = RegularizedKL(1e-2)(f, POINTS, prior)
    estimate.surrogate.backward()
    assert bool(estimate.value.isfinite())
    assert bool(lines.grad.isfinite().all())
