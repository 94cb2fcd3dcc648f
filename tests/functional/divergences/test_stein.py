# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The gradient of the KL divergence by estimated scores, against torch's own."""

import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_radial.functional import ImplicitProcess, SteinKL
from pyro_radial.functional.divergences.stein import SteinScore
from tests.helpers.functional import NUM_POINTS, POINTS, NormalPrior, SampledPrior, assert_mean_is, normal_p, normal_q

#: Without its kernel, which is shrunk, an estimator of normal distributions that is unbiased.
NORMAL_SCORE = SteinScore(ridge=1e9)


def score_gradients(divergence, q, prior, count, repeats):
    """Gradients in the mean and in the logarithm of the scale of q."""
    gradients = []
    for _ in range(repeats):
        loc, log_scale = q.mean.clone().requires_grad_(), torch.zeros((), dtype=torch.double, requires_grad=True)
        noise = torch.randn(count, NUM_POINTS, dtype=torch.double) @ q.scale_tril.mT
        divergence((loc + log_scale.exp() * noise).unsqueeze(-1), POINTS, prior).surrogate.backward()
        gradients.append(torch.cat([loc.grad, log_scale.grad.unsqueeze(0)]))
    return gradients


def true_gradient(q, p):
    loc, log_scale = q.mean.clone().requires_grad_(), torch.zeros((), dtype=torch.double, requires_grad=True)
    kl_divergence(MultivariateNormal(loc, scale_tril=log_scale.exp() * q.scale_tril), p).backward()
    return torch.cat([loc.grad, log_scale.grad.unsqueeze(0)])


def test_stein_kl_has_the_gradient_of_the_divergence_of_normal_distributions():
    q, p = normal_q(), normal_p()
    exact = score_gradients(SteinKL(NORMAL_SCORE), q, NormalPrior(p), 50, 100)
    assert_mean_is(exact, true_gradient(q, p))
    # The kernel's share of the score is shrunk by a few percent of the entropy's force, one a value.
    by_stein = score_gradients(SteinKL(), q, NormalPrior(p), 200, 30)
    assert_mean_is(by_stein, true_gradient(q, p), slack=0.03 * NUM_POINTS)


def test_stein_kl_estimates_the_score_of_a_sampled_prior():
    q, p = normal_q(), normal_p()
    truth = true_gradient(q, p)
    gradient = torch.stack(score_gradients(SteinKL(), q, SampledPrior(p), 100, 20)).mean(0)
    assert float((gradient - truth).norm() / truth.norm()) < 0.15


def test_a_gradient_from_a_distribution_to_itself_is_zero_in_the_mean():
    p = normal_p()
    for prior in (NormalPrior(p), SampledPrior(p)):
        divergence = SteinKL(NORMAL_SCORE, num_prior_samples=60)
        assert_mean_is(score_gradients(divergence, p, prior, 50, 100), torch.zeros(NUM_POINTS + 1))


def test_stein_kl_uses_the_estimator_it_is_given_for_both_distributions():
    seen = []

    def estimator(samples, at=None):
        seen.append((tuple(samples.shape), None if at is None else tuple(at.shape)))
        return torch.full_like(samples, 3.0) if at is None else torch.full_like(at, 1.0)

    f = torch.randn(9, NUM_POINTS, 2, requires_grad=True)
    divergence = SteinKL(estimator, num_prior_samples=30)
    estimate = divergence(f, POINTS.float(), ImplicitProcess(lambda x, s: torch.randn(s, len(x), 2)))
    assert seen == [((9, 24), None), ((30, 24), (9, 24))]
    estimate.surrogate.backward()
    torch.testing.assert_close(f.grad, torch.full_like(f, 2.0 / 9.0))
    assert estimate.value is None
