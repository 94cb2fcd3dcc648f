# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What holds for all divergences."""

import pytest
import torch
from pyro.contrib.gp.kernels import RBF

from pyro_radial.functional import GaussianKL, GaussianProcess, SteinKL
from tests.helpers.functional import NUM_POINTS, POINTS, NormalPrior, SampledPrior, normal_p, normal_q


@pytest.mark.parametrize("divergence", [SteinKL(), GaussianKL()])
def test_estimates_are_in_the_dtype_of_the_values(divergence):
    f = (normal_q().sample((50,)).float() + torch.randn(50, NUM_POINTS)).unsqueeze(-1).requires_grad_()
    prior = GaussianProcess(RBF(1), noise=0.1)
    estimate = divergence(f, POINTS.float(), prior)
    estimate.surrogate.backward()
    assert estimate.surrogate.dtype == f.grad.dtype == torch.float32
    assert estimate.surrogate.shape == ()
    if estimate.value is not None:
        assert not estimate.value.requires_grad
        assert torch.equal(estimate.value, estimate.surrogate.detach())
    reference = f.detach().double().requires_grad_()
    divergence(reference, POINTS.float(), prior).surrogate.backward()
    torch.testing.assert_close(f.grad, reference.grad.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, p: GaussianKL()(f(12, 1), POINTS, p), "f must be at least 13 draws"),
        (lambda f, p: GaussianKL()(f(24, 2), POINTS, p), "f must be at least 25 draws"),
        (lambda f, p: GaussianKL(factorize=True)(f(12, 2), POINTS, p), "f must be at least 13 draws"),
        (lambda f, p: SteinKL()(f(14, 1), POINTS, p), "samples must be at least 15 draws"),
        (lambda f, p: GaussianKL(False, 14)(f(20, 1), POINTS, SampledPrior(p.distribution)), "num_prior_samples must"),
        (
            lambda f, p: SteinKL(num_prior_samples=14)(f(20, 1), POINTS, SampledPrior(p.distribution)),
            "samples must be at least",
        ),
        (lambda f, p: GaussianKL()(f(20, 1) * torch.nan, POINTS, p), "f must be finite"),
        (lambda f, p: SteinKL()(f(20, 1) * torch.nan, POINTS, p), "f must be finite"),
        (lambda f, p: GaussianKL()(f(20, 1)[:, :1] * POINTS, POINTS, p), "f must not have a singular covariance"),
    ],
)
def test_what_cannot_be_estimated_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(
            lambda count, outputs: torch.randn(count, NUM_POINTS, outputs, dtype=torch.double), NormalPrior(normal_p())
        )
