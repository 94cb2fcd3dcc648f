# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro.contrib.gp.kernels as gp_kernels
import pytest
import torch

from pyro_radial.functional import GaussianProcess, PiecewiseConstant, Sum
from tests.helpers.processes import NUM_SAMPLES, column, gaussian_process


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


@pytest.mark.parametrize("priors", [[], [lambda x, s: x]])
def test_members_that_do_not_fit_are_refused_by_name(priors):
    with pytest.raises(ValueError, match="priors"):
        Sum(priors)
