# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro.contrib.gp.kernels as gp_kernels
import pytest
import torch

from pyro_radial.functional import GaussianProcess, ImplicitProcess, Mixture, PiecewiseConstant, Sum
from tests.helpers.processes import NUM_SAMPLES, column, gaussian_process


def test_a_mixture_draws_whole_functions_of_its_members_in_their_shares():
    constants = [ImplicitProcess(lambda x, s, c=c: torch.full((s, len(x)), c)) for c in (0.0, 1.0, 2.0)]
    prior = Mixture(constants, weights=[1.0, 2.0, 5.0])
    f = prior.sample(torch.zeros(3, 1), NUM_SAMPLES)[..., 0]
    assert bool((f == f[:, :1]).all())
    for c, share in enumerate((0.125, 0.25, 0.625)):
        tolerance = 5 * math.sqrt(share * (1 - share) / NUM_SAMPLES)
        assert float((f[:, 0] == c).double().mean()) == pytest.approx(share, abs=tolerance)
    # Neighbors are no more alike than any two draws.
    alike = float((f[1:, 0] == f[:-1, 0]).double().mean())
    assert alike == pytest.approx(0.125**2 + 0.25**2 + 0.625**2, abs=5 * 0.5 / math.sqrt(NUM_SAMPLES))


def test_a_mixture_of_densities_has_their_mean_as_density_and_its_gradient_as_score():
    x = column(-1.0, 0.0, 0.5)
    members = [gaussian_process(1.0, mean=-1.0), gaussian_process(0.3, mean=1.5)]
    prior = Mixture(members, weights=[1.0, 3.0])
    f = torch.randn(6, 3, 2, dtype=torch.double, requires_grad=True)
    density = 0.25 * members[0].log_prob(f, x).exp() + 0.75 * members[1].log_prob(f, x).exp()
    log_prob = prior.log_prob(f, x)
    torch.testing.assert_close(log_prob, density.log())
    torch.testing.assert_close(prior.score(f, x), torch.autograd.grad(log_prob.sum(), f)[0])
    assert prior.score(f.float(), x).dtype == torch.float32


def test_a_mixture_is_not_gaussian_and_names_a_member_without_density():
    prior = Mixture([GaussianProcess(gp_kernels.RBF(1)), PiecewiseConstant()])
    with pytest.raises(NotImplementedError, match="Mixture"):
        prior.moments(torch.zeros(3, 1))
    with pytest.raises(NotImplementedError, match="PiecewiseConstant"):
        prior.score(torch.zeros(2, 3, 1), torch.zeros(3, 1))


def test_a_mixture_carries_the_noise_that_its_members_share():
    assert Mixture([gaussian_process(1.0), gaussian_process(0.3)]).noise == pytest.approx(0.3)
    white = GaussianProcess(lambda a, b: a.new_zeros(len(a), len(b)), noise=0.3)
    assert Mixture([gaussian_process(), Sum([PiecewiseConstant(), white])]).noise == pytest.approx(0.3)


def test_a_sum_of_gaussian_processes_is_the_process_of_the_summed_kernel():
    x, f = column(-1.0, 0.0, 0.5), torch.randn(4, 3, 2, dtype=torch.double)
    parts = [gaussian_process(1.0, mean=1.0), gaussian_process(0.3, mean=2.0)]
    total = Sum(parts)
    kernel = gp_kernels.Sum(gp_kernels.RBF(1), gp_kernels.RBF(1, lengthscale=torch.tensor(0.3)))
    whole = GaussianProcess(kernel, mean=3.0, noise=0.3 * math.sqrt(2))
    torch.testing.assert_close(total.moments(x, 2), whole.moments(x, 2))
    torch.testing.assert_close(total.score(f, x), whole.score(f, x))
    torch.testing.assert_close(total.log_prob(f, x), whole.log_prob(f, x))
    drawn = total.sample(x, NUM_SAMPLES)[..., 0]
    mean, covariance = whole.moments(x)
    variance = covariance[0].diagonal()
    assert bool(((drawn.mean(0) - mean[:, 0]).abs() < 5 * (variance / NUM_SAMPLES).sqrt()).all())
    standard_error = ((variance[:, None] * variance + covariance[0].square()) / NUM_SAMPLES).sqrt()
    assert bool(((drawn.T.cov() - covariance[0]).abs() < 5 * standard_error).all())


def test_a_sum_carries_the_noise_of_all_its_parts():
    kernel = gp_kernels.RBF(1)
    assert Sum([GaussianProcess(kernel, noise=0.3), GaussianProcess(kernel, noise=0.4)]).noise == pytest.approx(0.5)
    assert Sum([GaussianProcess(kernel, noise=0.3), PiecewiseConstant()]).noise == pytest.approx(0.3)
    assert PiecewiseConstant().noise == 0.0


def test_a_sum_with_a_part_that_is_not_gaussian_draws_and_names_that_part():
    prior = Sum([gaussian_process(), PiecewiseConstant()])
    f = prior.sample(column(0.2, 0.7), NUM_SAMPLES)[..., 0]
    assert float(f.var(0)[0]) == pytest.approx(1.09 + 1 / 12, rel=5 * math.sqrt(2 / NUM_SAMPLES))
    for call in (lambda: prior.moments(column(0.2)), lambda: prior.score(torch.zeros(2, 1, 1), column(0.2))):
        with pytest.raises(NotImplementedError, match="PiecewiseConstant"):
            call()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sum([]), "priors"),
        (lambda: Sum([lambda x, s: x]), "priors"),
        (lambda: Mixture([]), "priors"),
        (lambda: Mixture([PiecewiseConstant()], weights=[1.0, 2.0]), "weights"),
        (lambda: Mixture([PiecewiseConstant(), gaussian_process()]), r"same noise, got \[0.0, 0.3\]"),
        (lambda: Mixture([PiecewiseConstant()], weights=[0.0]), "weights"),
    ],
)
def test_members_and_weights_that_do_not_fit_are_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()
