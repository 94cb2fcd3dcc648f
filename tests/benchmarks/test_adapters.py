# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The low-rank radial distribution of a benchmark against a linear map of a radial normal, and what the data hold."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from benchmarks.uncertainty.adapters import MOST, SIZES, LowRankRadial, LowRankRadialNormal, second_task
from pyro_radial import AutoRadial, RadialELBO
from pyro_radial.distributions import RadialNormal
from tests.helpers.models import matrix_model

SHAPE, RANK = (2, 3), 2


def low_rank():
    torch.manual_seed(0)
    loc, scale, factor = torch.randn(SHAPE), torch.rand(SHAPE) + 0.5, torch.randn(RANK, *SHAPE)
    q = LowRankRadialNormal(loc.double(), scale.double(), factor.double())
    flat = q.factor.flatten(1)
    return q, torch.linalg.cholesky(q.scale.flatten().square().diag() + flat.T @ flat)


def unit():
    return RadialNormal(torch.zeros(6).double(), torch.ones(6).double())


def test_density_and_entropy_are_those_of_a_mapped_radial_normal():
    q, root = low_rank()
    draws = q.sample((50,))
    mapped = torch.linalg.solve_triangular(root, (draws - q.loc).flatten(1).T, upper=False).T
    volume = root.diagonal().log().sum()
    torch.testing.assert_close(q.log_prob(draws), unit().log_prob(mapped) - volume)
    torch.testing.assert_close(q.entropy(), unit().entropy() + volume)


def test_draws_have_the_covariance_and_the_radius():
    q, root = low_rank()
    number = 100_000
    away = (q.rsample((number,)) - q.loc).flatten(1)
    mapped = torch.linalg.solve_triangular(root, away.T, upper=False).T
    # A half-normal radius: its square has mean 1 and standard deviation sqrt(2).
    assert float(mapped.square().sum(1).mean()) == pytest.approx(1.0, abs=4 * (2 / number) ** 0.5)
    # The directions are uniform: the covariance is I / 6, with a standard error of at most sqrt(9 / 48 / number).
    torch.testing.assert_close(mapped.T @ mapped / number, torch.eye(6).double() / 6, rtol=0.0, atol=0.006)
    torch.testing.assert_close(q.variance, (root @ root.T).diagonal().reshape(SHAPE) / 6)


def test_kl_to_a_normal_is_the_mean_of_log_ratios():
    q, _ = low_rank()
    p = dist.Normal(torch.full(SHAPE, 0.3).double(), 1.5).to_event(2)
    draws = q.sample((100_000,))
    ratios = q.log_prob(draws) - p.log_prob(draws)
    error = float(ratios.std()) / len(ratios) ** 0.5
    assert float(kl_divergence(q, p)) == pytest.approx(float(ratios.mean()), abs=4 * error)


def test_gradients_reach_the_factor_through_draws_and_through_the_kl():
    guide = AutoRadial(matrix_model, families={".": LowRankRadial()})
    guide.setup()
    elbo = RadialELBO(num_particles=2, strict_kl=True)
    elbo(matrix_model, guide)().backward()
    gradients = {name: value.grad for name, value in guide.named_parameters() if "factor" in name}
    assert gradients
    assert all(bool(gradient.abs().gt(0).all()) for gradient in gradients.values())


@pytest.mark.parametrize("seed", [0, 10])
def test_no_docstring_is_in_two_parts_or_dominates_one(seed):
    parts = second_task(seed, SIZES["default"])
    owners = [[row.owner for row in part] for part in parts]
    assert [len(part) for part in parts[:2]] == [240, 120]
    assert max(part.count(owner) for part in owners for owner in part) == MOST
    assert len(set().union(*owners)) == sum(len(set(part)) for part in owners)
