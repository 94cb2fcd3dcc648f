# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Thompson sampling and what it is compared with: against closed forms and chance."""

import math

import pytest
import torch
from pyro.contrib.gp.kernels import RBF

from benchmarks.decisions._bandit_loop import run_bandit
from benchmarks.decisions._environments import Bandit
from benchmarks.decisions._gp_policy import GaussianProcessThompson
from benchmarks.decisions._policies import LinearModel, LinearThompson
from pyro_radial.functional import GaussianProcess

WEIGHTS = torch.tensor([[1.0, -0.5], [-1.0, 0.5], [0.2, 1.0]])


def linear_bandit(num_steps):
    x = torch.randn(num_steps, 2)
    expected = x @ WEIGHTS.T
    return Bandit(x, expected + 0.1 * torch.randn(expected.shape), expected)


def test_linear_thompson_holds_the_conjugate_posterior_of_what_it_saw():
    policy, bandit = LinearThompson(), linear_bandit(50)
    result = run_bandit(bandit, policy, refit_every=1, seed=0)
    for arm in range(3):
        seen = result.arms == arm
        x = torch.cat([bandit[0][seen], torch.ones(int(seen.sum()), 1)], 1).double()
        y = result.rewards[seen].double()
        precision = 0.25 * torch.eye(3).double() + x.T @ x
        mean = torch.linalg.solve(precision, x.T @ y)
        rate = 6.0 + 0.5 * (y @ y - mean @ precision @ mean)
        expected = LinearModel(mean, precision, torch.tensor(6.0 + 0.5 * len(y)).double(), rate)
        for found, known in zip(policy._arms[arm], expected, strict=True):
            assert torch.allclose(found, known, rtol=1e-9)


def test_a_gaussian_process_decides_by_its_exact_posterior():
    policy = GaussianProcessThompson(GaussianProcess(RBF(input_dim=2)))
    policy.steps, policy.noise = 0, 0.2
    policy.begin(2, 2)
    x = torch.randn(12, 2)
    arms = torch.arange(12) % 2
    rewards = torch.where(arms == 0, x[:, 0], -x[:, 0])
    policy.refit(x, arms, rewards)
    standard = ((rewards.double() - rewards.double().mean()) / rewards.double().std(correction=0)).float()
    at = torch.tensor([0.3, 0.1])
    prior = GaussianProcess(RBF(input_dim=2))
    prior.observation_noise.fill_(0.2)
    moments = [prior.posterior(x[arms == arm], standard[arms == arm], at[None]) for arm in (0, 1)]
    mean = torch.stack([m[0, 0] for m, _ in moments])
    variance = torch.stack([c[0, 0, 0] for _, c in moments])
    torch.manual_seed(0)
    first = sum(policy.choose(at) == 0 for _ in range(1500)) / 1500
    expected = torch.distributions.Normal(0.0, 1.0).cdf((mean[0] - mean[1]) / variance.sum().sqrt())
    assert first == pytest.approx(float(expected), abs=4 * 0.5 / math.sqrt(1500))
