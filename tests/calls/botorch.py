# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.botorch``."""

import math
from functools import cache

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.botorch import FunctionDraws, ProcessModel
from pyro_radial.functional import PosteriorProcess
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Call, Lazy, non_negative_float, non_negative_int, positive_int, some, tensor

NAN = math.nan
POINTS = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.9]]).double()


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


points = tensor | some(3, POINTS.numpy(), torch.rand(3, 3).double(), POINTS[0], POINTS.long())
index = non_negative_int | {"too large": 3}

CALLS = [
    Call(
        "botorch.FunctionDraws",
        lambda: dict(functions=functions(), num_outputs=1),
        lambda found: found(POINTS).shape == (3, 3, 1),
        invalid=dict(functions=some(None, "x", 3, nn.Linear(2, 1), lambda x: x), num_outputs=positive_int | {"two": 2}),
        then=lambda found: (found(POINTS), found)[1],
    ),
    Call(
        "botorch.FunctionDraws.forward",
        lambda: dict(X=POINTS),
        lambda found: found.shape == (3, 3, 1),
        invalid=dict(X=points),
        on=lambda: FunctionDraws(functions()),
    ),
    Call(
        "botorch.FunctionDraws.one",
        lambda: dict(index=1),
        lambda found: torch.equal(found(POINTS), FunctionDraws(functions())(POINTS)[1]),
        invalid=dict(index=index),
        on=lambda: FunctionDraws(functions()),
    ),
    Call(
        "botorch.ProcessModel",
        lambda: dict(process=process(), noise=0.1),
        lambda found: found.noise == 0.1,
        invalid=dict(
            process=some(None, "x", 3, nn.Linear(2, 1)) | {"network": Lazy(lambda: network_and_guide()[0])},
            noise=non_negative_float | {"flag": True},
        ),
    ),
    Call(
        "botorch.ProcessModel.posterior",
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
