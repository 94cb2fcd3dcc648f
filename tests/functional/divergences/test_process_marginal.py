# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The sum of KLs of marginals, against torch's own and finite differences."""

import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn
from torch.distributions import kl_divergence

from pyro_radial import BayesianModule
from pyro_radial.functional import FunctionPrior, GaussianProcess, PosteriorProcess
from pyro_radial.nn.linearized.linearization import CovarianceBlock, Linearization
from tests.helpers.divergences import MarginalKL
from tests.helpers.linear_models import by_hand, inputs, of_functions, posterior


def marginals_of(kind, x):
    given, mean, covariance = posterior(kind, "weight")
    mean, covariance = of_functions(mean, covariance, x)
    return PosteriorProcess(by_hand, given), dist.Normal(mean, covariance.diagonal(dim1=-2, dim2=-1).mT.sqrt())


@pytest.mark.parametrize("kind", ["full", "radial", "normal"])
def test_it_is_the_sum_of_the_kls_of_the_marginals(kind):
    x = inputs()
    q, normal_q = marginals_of(kind, x)
    p, normal_p = marginals_of("normal", x)
    estimate = MarginalKL()(q, x, p)
    torch.testing.assert_close(estimate.value, kl_divergence(normal_q, normal_p).sum())
    assert torch.equal(estimate.surrogate, estimate.value)
    assert float(MarginalKL()(p, x, p).value) == 0.0


def test_the_noise_of_a_gaussian_process_counts_for_both():
    x = inputs()
    process, normal = marginals_of("normal", x)
    prior = GaussianProcess(RBF(2), mean=0.3, noise=0.5)
    noisy = dist.Normal(normal.loc, (normal.variance + 0.25).sqrt())
    expected = kl_divergence(noisy, dist.Normal(0.3, 1.25**0.5)).sum()
    torch.testing.assert_close(MarginalKL()(process, x, prior).value, expected)


def test_variances_of_zero_have_a_floor_and_a_finite_gradient():
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    bnn = BayesianModule(net)
    mean = {name: torch.randn_like(value).requires_grad_() for name, value in bnn.sample_parameters().items()}
    variance = {name: torch.full_like(value, 0.1).requires_grad_() for name, value in mean.items()}
    process = Linearization(bnn, mean, [CovarianceBlock((name,), value) for name, value in variance.items()])
    posterior = {name: dist.Normal(value.detach() + 0.1, 0.2).to_event(2) for name, value in mean.items()}
    x = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    prior = PosteriorProcess(bnn, posterior)
    # At the origin no weight moves the function.
    assert float(prior.marginals(x)[1][0]) == 0.0
    estimate = MarginalKL()(process, x, prior)
    gradients = torch.autograd.grad(estimate.surrogate, [*mean.values(), *variance.values()])
    assert all(bool(gradient.isfinite().all()) for gradient in (estimate.value, *gradients))
    at_origin = MarginalKL()(process, x[:1], prior)
    assert float(at_origin.value) == 0.0


def test_the_floor_stands_for_smaller_variances():
    class Known(FunctionPrior):
        def __init__(self, mean, variance):
            super().__init__()
            self.mean, self.variance, self.noise = torch.tensor([[mean]]), torch.tensor([[variance]]), 0.0

        def marginals(self, x, num_outputs=1):
            return self.mean, self.variance

    value = MarginalKL()(Known(0.5, 0.0), torch.zeros(1, 1), Known(0.3, 1e-9)).value
    assert float(value) == pytest.approx(0.5 * 0.2**2 / 1e-6, rel=1e-5)


def test_its_gradient_runs_through_the_jacobian():
    bnn = BayesianModule(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    mean = {name: torch.randn_like(value).requires_grad_() for name, value in bnn.sample_parameters().items()}
    scale = {name: (0.1 + torch.rand_like(value)).detach().requires_grad_() for name, value in mean.items()}
    prior = PosteriorProcess(
        bnn, {name: dist.Normal(torch.randn_like(value), 0.3).to_event(value.dim()) for name, value in mean.items()}
    )
    x = inputs(4)

    def divergence(*tensors):
        blocks = [CovarianceBlock((name,), value.square()) for name, value in scale.items()]
        return MarginalKL()(Linearization(bnn, mean, blocks), x, prior).surrogate

    assert torch.autograd.gradcheck(divergence, (*mean.values(), *scale.values()))
