# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The joint KL of a linearized model, against torch's own, finite differences and the posterior of a linear model."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn
from torch.distributions import kl_divergence

from pyro_radial import BayesianModule
from pyro_radial.functional import FunctionPrior, GaussianProcess, LinearizedKL, PosteriorProcess
from pyro_radial.functional.divergences.process import kl_of_marginals
from pyro_radial.nn.linearized.linearization import CovarianceBlock, Linearization
from tests.helpers.linear_models import by_hand, inputs, of_functions, posterior

GAMMA, NOISE = 0.03, 0.4


def moments_of(kind, x):
    given, mean, covariance = posterior(kind, "weight")
    return PosteriorProcess(by_hand, given), of_functions(mean, covariance, x)


@pytest.mark.parametrize("kind", ["full", "radial", "normal"])
@pytest.mark.parametrize("gamma", [0.0, GAMMA])
@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_it_is_the_sum_of_the_joint_kls_of_the_outputs(kind, gamma, noise):
    x = inputs()
    process, (mean, covariance) = moments_of(kind, x)
    if not (gamma or noise):
        # As many points as there are weights: more have a singular covariance.
        x, mean, covariance = x[:2], mean[:2], covariance[:, :2, :2]
    more = (gamma * len(x) + noise**2) * torch.eye(len(x), dtype=torch.double)
    prior = GaussianProcess(RBF(2), mean=0.3, noise=noise)
    kernel = RBF(2)(x.double()).detach().double()
    q = dist.MultivariateNormal(mean.mT.double(), covariance.double() + more)
    p = dist.MultivariateNormal(torch.full_like(mean.mT.double(), 0.3), kernel + more)
    estimate = LinearizedKL(gamma)(process, x, prior)
    torch.testing.assert_close(estimate.value.double(), kl_divergence(q, p).sum(), rtol=1e-5, atol=1e-5)
    assert torch.equal(estimate.surrogate, estimate.value)


def test_its_gradient_runs_through_the_jacobian():
    bnn = BayesianModule(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    torch.manual_seed(0)
    mean = {name: torch.randn_like(value).requires_grad_() for name, value in bnn.sample_parameters().items()}
    scale = {name: (0.1 + torch.rand_like(value)).detach().requires_grad_() for name, value in mean.items()}
    prior, x = GaussianProcess(RBF(2).double(), noise=NOISE), torch.randn(4, 2, dtype=torch.double)
    names = list(mean)

    def divergence(*values):
        means, scales = values[: len(names)], values[len(names) :]
        blocks = [CovarianceBlock((name,), value.square()) for name, value in zip(names, scales, strict=True)]
        process = Linearization(bnn, dict(zip(names, means, strict=True)), blocks)
        return LinearizedKL(GAMMA)(process, x, prior).surrogate

    assert torch.autograd.gradcheck(divergence, [*mean.values(), *scale.values()])


class ByDraws(FunctionPrior):
    """A Gaussian process that says no moments."""

    def __init__(self, prior):
        super().__init__()
        self.prior, self.noise = prior, prior.noise

    def _sample(self, x, num_samples, num_outputs):
        return self.prior.sample(x, num_samples, num_outputs)


@pytest.mark.parametrize("gamma", [0.0, GAMMA])
def test_a_prior_known_by_draws_has_the_same_divergence(gamma):
    """The corrections leave no bias, or a small one with noise; the spread of estimates is the tolerance."""
    x = inputs()
    process, _ = moments_of("normal", x)
    prior = GaussianProcess(RBF(2), mean=0.3, noise=NOISE)
    pyro.set_rng_seed(0)
    divergence = LinearizedKL(gamma, num_prior_samples=500)
    values = torch.stack([divergence(process, x, ByDraws(prior)).value for _ in range(16)])
    exact = LinearizedKL(gamma)(process, x, prior).value
    assert abs(float(values.mean() - exact)) < 4 * float(values.std()) / 4


def test_the_kl_of_marginals_is_torchs_sum_and_has_a_floor_under_variances():
    mean, variance = torch.randn(2, 5, 2), 0.1 + torch.rand(2, 5, 2)
    q, p = (dist.Normal(mean[i], variance[i].sqrt()) for i in range(2))
    found = kl_of_marginals((mean[0], variance[0]), (mean[1], variance[1]))
    torch.testing.assert_close(found.float(), kl_divergence(q, p).sum())
    gap = kl_of_marginals(
        (torch.tensor([[0.5]]), torch.tensor([[0.0]])), (torch.tensor([[0.3]]), torch.tensor([[1e-9]]))
    )
    assert float(gap) == pytest.approx(0.5 * 0.2**2 / 1e-6, rel=1e-5)


def test_few_draws_of_a_prior_are_refused():
    x = inputs()
    process, _ = moments_of("normal", x)
    with pytest.raises(ValueError, match=f"num_prior_samples must be at least {len(x) + 3}"):
        LinearizedKL(num_prior_samples=len(x))(process, x, ByDraws(GaussianProcess(RBF(2), noise=NOISE)))
