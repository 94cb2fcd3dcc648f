# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A bandit with Thompson sampling."""

from functools import partial

import torch

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.decisions import ThompsonSampling, run_bandit
from pyro_radial.nn.likelihoods import MaskedGaussian
from tests.golden.programs import network, program, values


@program
def thompson_sampling():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    expected = x @ torch.tensor([[1.0, -0.5], [-1.0, 0.5], [0.2, 1.0]]).T
    rewards = expected + 0.1 * torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    results = {}
    for guide_type in (AutoRadial, AutoMeanField):
        model = SupervisedModel(BayesianModule(network(2, 6, 3)), MaskedGaussian(scale=0.3))
        guide = guide_type(model)
        policy = ThompsonSampling(
            model,
            guide,
            reward_scale=2.0,
            steps=5,
            batch_size=16,
            optim=partial(torch.optim.Adam, lr=0.02),
            compile=False,
        )
        result = run_bandit(x, rewards, policy, expected=expected, refit_every=10, progress=False)
        results[guide_type.__name__] = {
            "arms": result.arms,
            "rewards": result.rewards,
            "regret": result.relative_regret(),
            "parameters": values(guide),
        }
    return results
