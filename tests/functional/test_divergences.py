# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from scipy.special import digamma
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_radial.functional import FunctionPrior, GaussianProcess, ImplicitProcess
from pyro_radial.functional.divergences import GaussianKL, RegularisedKL, SteinKL
from pyro_radial.functional.scores import GaussianMoments

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


def q_distribution():
    return MultivariateNormal((3 * POINTS[:, 0]).sin() / 2, kernel(0.3, 0.3) + eye(NUM_POINTS, 0.05))


def p_distribution():
    return MultivariateNormal(0.1 * POINTS[:, 0], kernel(0.5) + eye(NUM_POINTS, 0.01))


def with_noise(distribution, variance):
    return MultivariateNormal(distribution.mean, distribution.covariance_matrix + eye(NUM_POINTS, variance))


def draws(distribution, count):
    return distribution.sample((count,)).unsqueeze(-1)


def assert_mean_is(estimates, truth, slack=0.0):
    """Within four standard errors, and a bias that is known."""
    estimates = torch.stack(estimates)
    deviation = (estimates.mean(0) - truth).abs()
    assert bool((deviation <= 4.0 * estimates.std(0) / len(estimates) ** 0.5 + slack).all())


# The divergence of normal distributions by their sampled moments.


@pytest.mark.parametrize("count", [NUM_POINTS + 1, 50])
def test_gaussian_kl_is_unbiased(count):
    q, p = q_distribution(), p_distribution()
    values = [GaussianKL()(draws(q, count), POINTS, NormalPrior(p)).value for _ in range(300)]
    assert_mean_is(values, kl_divergence(q, p))


@pytest.mark.parametrize(("count", "num_prior_samples"), [(30, 40), (100, 40), (30, 400)])
def test_gaussian_kl_is_unbiased_with_a_sampled_prior(count, num_prior_samples):
    q, p = q_distribution(), p_distribution()
    divergence = GaussianKL(num_prior_samples=num_prior_samples)
    values = [divergence(draws(q, count), POINTS, SampledPrior(p)).value for _ in range(300)]
    assert_mean_is(values, kl_divergence(q, p))


def white(count, dim):
    """Draws whose mean is zero and covariance one, exactly."""
    values = torch.randn(count, dim, dtype=torch.double)
    values -= values.mean(0)
    return values @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(values.mT).reshape(dim, dim))).mT


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


def test_gradient_of_gaussian_kl_is_unbiased():
    q, p = q_distribution(), p_distribution()
    loc, factor = q.mean.clone().requires_grad_(), q.scale_tril.clone().requires_grad_()
    kl_divergence(MultivariateNormal(loc, scale_tril=factor), p).backward()
    truth = torch.cat([loc.grad.unsqueeze(-1), factor.grad.tril()], -1)
    gradients = []
    for _ in range(200):
        loc.grad = factor.grad = None
        f = loc + torch.randn(30, NUM_POINTS, dtype=torch.double) @ factor.mT
        GaussianKL()(f.unsqueeze(-1), POINTS, NormalPrior(p)).surrogate.backward()
        gradients.append(torch.cat([loc.grad.unsqueeze(-1), factor.grad.tril()], -1))
    assert_mean_is(gradients, truth, slack=1e-4)


def linear_model():
    """Targets of a linear model in random features, the exact posterior of its values, and their log-density."""
    noise = 0.1
    features = torch.randn(NUM_POINTS, 30, dtype=torch.double) / 30**0.5
    prior = MultivariateNormal(
        torch.zeros(NUM_POINTS, dtype=torch.double), features @ features.mT + eye(NUM_POINTS, 1e-3)
    )
    evidence = MultivariateNormal(prior.mean, prior.covariance_matrix + eye(NUM_POINTS, noise**2))
    y = evidence.sample()
    gain = torch.linalg.solve(evidence.covariance_matrix, prior.covariance_matrix).mT
    covariance = prior.covariance_matrix - gain @ prior.covariance_matrix
    posterior = MultivariateNormal(gain @ y, 0.5 * (covariance + covariance.mT))

    def log_likelihood(f):
        return torch.distributions.Normal(f.squeeze(-1), noise).log_prob(y).sum(-1).mean()

    return prior, posterior, log_likelihood, evidence.log_prob(y)


def test_elbo_at_the_exact_posterior_of_a_linear_model_is_the_log_evidence():
    prior, posterior, log_likelihood, log_evidence = linear_model()
    f = draws(posterior, 50_000)
    elbo = log_likelihood(f) - GaussianKL()(f, POINTS, NormalPrior(prior)).value
    assert float(elbo) == pytest.approx(float(log_evidence), abs=0.01)


def test_with_few_draws_it_is_the_correction_that_makes_the_elbo_right():
    prior, posterior, log_likelihood, log_evidence = linear_model()
    elbos, uncorrected = [], []
    for _ in range(200):
        f = draws(posterior, 200)
        elbos.append(log_likelihood(f) - GaussianKL()(f, POINTS, NormalPrior(prior)).value)
        fitted = MultivariateNormal(f.mean((0, 2)), torch.cov(f.squeeze(-1).mT, correction=0))
        uncorrected.append(log_likelihood(f) - kl_divergence(fitted, prior))
    assert_mean_is(elbos, log_evidence)
    assert float(log_evidence - torch.stack(uncorrected).mean()) == pytest.approx(0.23, abs=0.01)


def test_gaussian_kl_has_the_gradient_in_the_points():
    prior = GaussianProcess(RBF(1, lengthscale=torch.tensor(0.5)), noise=0.3)
    noise = torch.randn(40, 3, 1, dtype=torch.double)

    def divergence(x):
        return GaussianKL()(x + x * noise, x, prior).surrogate

    torch.autograd.gradcheck(divergence, torch.tensor([[-1.0], [0.4], [1.5]], dtype=torch.double, requires_grad=True))


# Several outputs.


def mixed_outputs(q, count):
    """Two outputs with correlation 0.8, each of distribution q."""
    f = q.sample((count, 2))
    mixing = torch.tensor([[1.0, 0.0], [0.8, 0.6]], dtype=torch.double)
    return (q.mean + torch.einsum("po,son->spn", mixing, f - q.mean)).mT


def test_outputs_are_compared_jointly_unless_factorized():
    q, p = q_distribution(), p_distribution()
    joint = [GaussianKL()(mixed_outputs(q, 60), POINTS, NormalPrior(p)).value for _ in range(300)]
    information = -0.5 * NUM_POINTS * math.log(1 - 0.8**2)
    assert_mean_is(joint, 2 * kl_divergence(q, p) + information)
    # Each by itself is of distribution q; what one output knows of the other is left out.
    single = [GaussianKL(factorize=True)(mixed_outputs(q, 60), POINTS, NormalPrior(p)).value for _ in range(300)]
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
    # With noise that covers both distributions nothing is left.
    assert float(RegularisedKL(1e9, factorize=factorize)(f[0], x, prior).value) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("factorize", [False, True])
def test_a_sampled_prior_of_several_outputs_is_estimated_as_the_draws_are(factorize):
    q, p = q_distribution(), p_distribution()
    divergence = GaussianKL(factorize=factorize, num_prior_samples=100)
    values = [divergence(q.sample((60, 2)).mT, POINTS, SampledPrior(p)).value for _ in range(200)]
    assert_mean_is(values, 2 * kl_divergence(q, p))


# The regularized divergence.


@pytest.mark.parametrize("prior", [NormalPrior, SampledPrior])
@pytest.mark.parametrize("gamma", [1e-4, 1e-2, 1.0])
def test_regularized_kl_is_that_of_distributions_with_noise(gamma, prior):
    q, p = q_distribution(), p_distribution()
    truth = kl_divergence(*(with_noise(distribution, gamma * NUM_POINTS) for distribution in (q, p)))
    divergence = RegularisedKL(gamma, num_prior_samples=300)
    values = [divergence(draws(q, 100), POINTS, prior(p)).value for _ in range(100)]
    # What is left of the bias is of the second order of one over the number of draws.
    assert_mean_is(values, truth, slack=0.01 * float(truth))


def test_regularized_kl_needs_no_more_draws_than_points_where_noise_covers_directions():
    q, p, gamma = q_distribution(), p_distribution(), 0.1
    truth = kl_divergence(*(with_noise(distribution, gamma * NUM_POINTS) for distribution in (q, p)))
    values = [RegularisedKL(gamma)(draws(q, 8), POINTS, NormalPrior(p)).value for _ in range(300)]
    assert_mean_is(values, truth, slack=0.03)


@pytest.mark.parametrize("prior", [NormalPrior, SampledPrior])
def test_regularized_kl_tends_to_gaussian_kl(prior):
    f, p = draws(q_distribution(), 50), p_distribution()
    torch.manual_seed(1)
    expected = GaussianKL()(f, POINTS, prior(p)).value
    torch.manual_seed(1)
    torch.testing.assert_close(RegularisedKL(1e-11)(f, POINTS, prior(p)).value, expected, rtol=1e-5, atol=0)


def test_regularized_kl_is_finite_where_the_divergence_is_not():
    lines = torch.randn(50, 1, 1, dtype=torch.double, requires_grad=True)
    f, prior = lines * POINTS, NormalPrior(p_distribution())
    with pytest.raises(ValueError, match=r"f must not have a singular covariance.*RegularisedKL"):
        GaussianKL()(f, POINTS, prior)
    estimate = RegularisedKL(1e-2)(f, POINTS, prior)
    estimate.surrogate.backward()
    assert bool(estimate.value.isfinite())
    assert bool(lines.grad.isfinite().all())


def test_regularized_kl_has_the_gradient_of_its_value():
    f = draws(q_distribution(), 6)
    for prior in (NormalPrior(p_distribution()), SampledPrior(p_distribution())):

        def divergence(f, prior=prior):
            torch.manual_seed(1)
            return RegularisedKL(1e-2, num_prior_samples=20)(f, POINTS, prior).surrogate

        torch.autograd.gradcheck(divergence, f.clone().requires_grad_(), rtol=1e-4, atol=1e-6, fast_mode=True)


# The gradient by scores.


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
    q, p = q_distribution(), p_distribution()
    exact = score_gradients(SteinKL(GaussianMoments()), q, NormalPrior(p), 50, 300)
    assert_mean_is(exact, true_gradient(q, p))
    # The kernel's share of the score is shrunk by a few percent of the entropy's force, one a value.
    by_stein = score_gradients(SteinKL(), q, NormalPrior(p), 200, 30)
    assert_mean_is(by_stein, true_gradient(q, p), slack=0.03 * NUM_POINTS)


@pytest.mark.parametrize("estimator", [None, GaussianMoments()])
def test_stein_kl_estimates_the_score_of_a_sampled_prior(estimator):
    q, p = q_distribution(), p_distribution()
    truth = true_gradient(q, p)
    gradient = torch.stack(score_gradients(SteinKL(estimator), q, SampledPrior(p), 100, 20)).mean(0)
    assert float((gradient - truth).norm() / truth.norm()) < 0.15


def test_a_gradient_from_a_distribution_to_itself_is_zero_in_the_mean():
    p = p_distribution()
    for prior in (NormalPrior(p), SampledPrior(p)):
        divergence = SteinKL(GaussianMoments(), num_prior_samples=60)
        assert_mean_is(score_gradients(divergence, p, prior, 50, 300), torch.zeros(NUM_POINTS + 1))


def test_stein_kl_uses_the_estimators_it_is_given_for_each_distribution():
    seen = []

    def estimator(name, value):
        def estimate(samples, at=None):
            seen.append((name, tuple(samples.shape), None if at is None else tuple(at.shape)))
            return torch.full_like(samples if at is None else at, value)

        return estimate

    f = torch.randn(9, NUM_POINTS, 2, requires_grad=True)
    divergence = SteinKL(estimator("q", 3.0), estimator("p", 1.0), num_prior_samples=30)
    estimate = divergence(f, POINTS.float(), ImplicitProcess(lambda x, s: torch.randn(s, len(x), 2)))
    assert seen == [("q", (9, 24), None), ("p", (30, 24), (9, 24))]
    estimate.surrogate.backward()
    torch.testing.assert_close(f.grad, torch.full_like(f, 2.0 / 9.0))
    assert estimate.value is None


# What holds for all.

DIVERGENCES = {"stein": SteinKL(), "gaussian": GaussianKL(), "regularized": RegularisedKL(1e-3)}
each_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES.keys())


@each_divergence
def test_estimates_are_in_the_dtype_of_the_values(divergence):
    f = (q_distribution().sample((50,)).float() + torch.randn(50, NUM_POINTS)).unsqueeze(-1).requires_grad_()
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


@each_divergence
@pytest.mark.parametrize(
    ("f", "x", "message"),
    [
        (torch.randn(50, 4, 1), torch.randn(5, 1), "f must be function values"),
        (torch.randn(50, 5), torch.randn(5, 1), "f must be function values"),
        (torch.ones(50, 5, 1, dtype=torch.long), torch.randn(5, 1), "f must be a tensor of floating-point"),
        (torch.ones(50, 5, 1, dtype=torch.cfloat), torch.randn(5, 1), "f must be a tensor of floating-point"),
        (torch.randn(50, 5, 1), torch.ones(5, 1, dtype=torch.long), "x must be"),
    ],
)
def test_bad_input_is_named(divergence, f, x, message):
    with pytest.raises(ValueError, match=message):
        divergence(f, x, GaussianProcess(RBF(1)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, p: GaussianKL()(f(12, 1), POINTS, p), "f must be at least 13 draws"),
        (lambda f, p: GaussianKL()(f(24, 2), POINTS, p), "f must be at least 25 draws"),
        (lambda f, p: GaussianKL(factorize=True)(f(12, 2), POINTS, p), "f must be at least 13 draws"),
        (lambda f, p: RegularisedKL(0.1)(f(1, 1), POINTS, p), "f must be at least two draws"),
        (lambda f, p: SteinKL()(f(14, 1), POINTS, p), "samples must be at least 15 draws"),
        (lambda f, p: GaussianKL(False, 14)(f(20, 1), POINTS, SampledPrior(p.distribution)), "num_prior_samples must"),
        (
            lambda f, p: RegularisedKL(1.0, num_prior_samples=1)(f(9, 1), POINTS, SampledPrior(p.distribution)),
            "num_prior_sample",
        ),
        (
            lambda f, p: SteinKL(num_prior_samples=14)(f(20, 1), POINTS, SampledPrior(p.distribution)),
            "samples must be at least",
        ),
        (lambda f, p: GaussianKL()(f(20, 1) * torch.nan, POINTS, p), "f must not have a singular covariance"),
        (lambda f, p: SteinKL()(f(20, 1) * torch.nan, POINTS, p), "samples must be finite"),
        (lambda f, p: RegularisedKL(0.0), "gamma must be positive"),
        (lambda f, p: GaussianKL(num_prior_samples=0), "num_prior_samples"),
        (lambda f, p: SteinKL(num_prior_samples=0), "num_prior_samples"),
        (lambda f, p: SteinKL(estimator=3), "estimator must be a function"),
        (lambda f, p: SteinKL(prior_estimator="oas"), "prior_estimator must be a function"),
    ],
)
def test_what_cannot_be_estimated_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(
            lambda count, outputs: torch.randn(count, NUM_POINTS, outputs, dtype=torch.double),
            NormalPrior(p_distribution()),
        )
