# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.decisions``."""

import math
from functools import cache, partial

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.decisions import Policy, ThompsonSampling
from pyro_radial.decisions.botorch_models import FunctionDraws, ProcessModel
from pyro_radial.functional import PosteriorProcess
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods
from tests.calls.sweep import (
    Call,
    Lazy,
    Part,
    flag,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    some,
    tensor,
)

NAN = math.nan
X = torch.linspace(-1, 1, 24).reshape(12, 2)
REWARDS = torch.cat([X, -X], 1)
POINTS = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.9]]).double()


class Always(Policy):
    """The same arm in every context."""

    def __init__(self, arm=1):
        self.arm = arm

    def choose(self, context):
        return self.arm


def begun(policy):
    policy.begin(2, 4)
    return policy


def model_and_guide():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 4)), likelihoods.MaskedGaussian(scale=0.3))
    return model, AutoRadial(model)


def thompson():
    return ThompsonSampling(*model_and_guide(), steps=2, compile=False)


@cache
def network_and_guide():
    bnn = BayesianModule(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    guide = AutoRadial(bnn)
    guide.setup(POINTS)
    return bnn, guide


@cache
def functions():
    bnn = network_and_guide()[0]
    model = SupervisedModel(bnn, likelihoods.Gaussian(num_data=3, scale=0.1))
    guide = AutoRadial(model)
    guide.setup(POINTS, POINTS[:, :1])
    return SampledNetwork(model, guide, num_samples=3)


@cache
def process():
    bnn, guide = network_and_guide()
    return PosteriorProcess(bnn, guide.posterior())


table = tensor | some(3, [[1.0]], X.numpy(), X[:, 0], X.long(), X * NAN, X[:0])
contexts_of_one = tensor | some(3, [1.0, 2.0], torch.rand(3), X[:1], torch.tensor([NAN, 1.0]), torch.tensor([1, 2]))
points = tensor | some(3, POINTS.numpy(), torch.rand(3, 3).double(), POINTS[0], POINTS.long())
index = non_negative_int | {"too large": 3}
refit_options = {
    f"{option} {label}": Part(option, {option: value})
    for option, values in {
        "loss": some("x", 3, RadialELBO),
        "optim": some("x", 3),
        "steps": positive_int,
        "batch_size": positive_int,
        "compile": flag,
    }.items()
    for label, value in values.items()
}


def chosen(expected):
    return lambda found: found.arms.tolist()[4:] == [expected] * 8


CALLS = [
    Call(
        "decisions.run_bandit",
        lambda: dict(
            contexts=X,
            rewards=REWARDS,
            policy=Always(),
            expected=REWARDS,
            refit_every=3,
            initial_pulls=1,
            seed=0,
            checkpoint=None,
            progress=False,
        ),
        chosen(1),
        invalid=dict(
            contexts=table,
            rewards=table | {"fewer rows": REWARDS[:3]},
            policy=some(None, "x", 3, Always)
            | {f"chooses {arm}": Lazy(partial(Always, arm)) for arm in (4, -1, 1.5, None, "x")},
            expected=some("x", 3, X, REWARDS.long(), REWARDS * NAN),
            refit_every=positive_int,
            initial_pulls=non_negative_int | {"more than contexts": 99},
            seed=non_negative_int,
            checkpoint=some(3, 1.5, torch.ones(1)),
            progress=flag,
        ),
        also=(({"expected": None}, chosen(1)),),
    ),
    Call(
        "decisions.Policy.begin",
        lambda: dict(num_features=2, num_arms=3),
        lambda found: found is None,
        invalid=dict(num_features=positive_int, num_arms=positive_int),
        on=Always,
    ),
    Call(
        "decisions.Policy.check_context",
        lambda: dict(context=torch.zeros(2)),
        lambda found: found is None,
        invalid=dict(context=contexts_of_one),
        on=lambda: begun(Always()),
    ),
    Call(
        "decisions.ThompsonSampling",
        lambda: dict(
            **dict(zip(("model", "guide"), model_and_guide(), strict=True)),
            reward_scale=2.0,
            refit_options=dict(
                loss=RadialELBO(), optim=partial(torch.optim.Adam, lr=0.1), steps=2, batch_size=4, compile=False
            ),
        ),
        lambda found: found.reward_scale == 2.0,
        invalid=dict(
            model=some(None, "x", 3, SupervisedModel),
            guide=some(None, "x", 3, AutoRadial),
            reward_scale=positive_float,
            refit_options=refit_options | {"None": Part("optim", {"optim": None})},
        ),
    ),
    Call(
        "decisions.ThompsonSampling.begin",
        lambda: dict(num_features=2, num_arms=4),
        lambda found: found is None,
        invalid=dict(num_features=positive_int, num_arms=positive_int),
        on=thompson,
    ),
    Call(
        "decisions.ThompsonSampling.choose",
        lambda: dict(context=torch.zeros(2)),
        lambda found: found in range(4),
        invalid=dict(context=contexts_of_one),
        on=lambda: begun(thompson()),
    ),
    Call(
        "decisions.ThompsonSampling.refit",
        lambda: dict(contexts=X[:3], arms=torch.tensor([0, 1, 2]), rewards=torch.tensor([0.1, 0.2, 0.3])),
        lambda found: found is None,
        invalid=dict(
            contexts=tensor | some(3, [[1.0]], X[:0], torch.rand(3, 3), X[:3] * NAN, X[0]),
            arms=tensor
            | some(3, [0, 1, 2], torch.tensor([0, 1]), torch.tensor([0, 1, 9]), torch.tensor([0, 1, -1]))
            | {"real": torch.tensor([0.0, 1.0, 2.0])},
            rewards=tensor
            | some(3, [0.1] * 3, torch.rand(2), torch.full((3,), NAN), torch.rand(3, 2), torch.ones(3).long()),
        ),
        on=lambda: begun(thompson()),
    ),
    Call(
        "decisions.ThompsonSampling.load_state_dict",
        lambda: dict(state=begun(thompson()).state_dict()),
        lambda found: found is None,
        invalid=dict(state=some(None, "x", 3, {}, {"refits": {}}, {"refits": 3})),
        on=lambda: begun(thompson()),
    ),
    Call(
        "decisions.botorch_models.FunctionDraws",
        lambda: dict(functions=functions(), num_outputs=1),
        lambda found: found(POINTS).shape == (3, 3, 1),
        invalid=dict(functions=some(None, "x", 3, nn.Linear(2, 1), lambda x: x), num_outputs=positive_int | {"two": 2}),
        then=lambda found: (found(POINTS), found)[1],
    ),
    Call(
        "decisions.botorch_models.FunctionDraws.forward",
        lambda: dict(X=POINTS),
        lambda found: found.shape == (3, 3, 1),
        invalid=dict(X=points),
        on=lambda: FunctionDraws(functions()),
    ),
    Call(
        "decisions.botorch_models.FunctionDraws.one",
        lambda: dict(index=1),
        lambda found: torch.equal(found(POINTS), FunctionDraws(functions())(POINTS)[1]),
        invalid=dict(index=index),
        on=lambda: FunctionDraws(functions()),
    ),
    Call(
        "decisions.botorch_models.ProcessModel",
        lambda: dict(process=process(), noise=0.1),
        lambda found: found.noise == 0.1,
        invalid=dict(
            process=some(None, "x", 3, nn.Linear(2, 1)) | {"network": Lazy(lambda: network_and_guide()[0])},
            noise=non_negative_float | {"flag": True},
        ),
    ),
    Call(
        "decisions.botorch_models.ProcessModel.posterior",
        lambda: dict(X=POINTS, observation_noise=False, posterior_transform=None),
        lambda found: found.mean.shape == (3, 1),
        invalid=dict(
            X=points,
            observation_noise=some(None, "x", 3, torch.rand(3, 5))
            | {"negative": -torch.ones(3, 1).double(), "nan": torch.full((3, 1), NAN).double()},
            posterior_transform=some("x", 3, [1]),
        ),
        also=(({"observation_noise": 0.01 * torch.ones(3, 1).double()}, lambda found: found.mean.shape == (3, 1)),),
        on=lambda: ProcessModel(process()),
        unchecked={"output_indices": "ignored, since there is one output"},
    ),
]
NOT_CALLED = {
    "decisions.Policy.choose": "users define it; run_bandit gives it a context",
    "decisions.Policy.refit": "users define it; run_bandit gives it its decisions so far",
    "decisions.Policy.load_state_dict": "users define it; run_bandit gives it what state_dict returned",
}
