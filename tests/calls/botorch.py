# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.botorch``."""

from functools import cache

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.botorch import FunctionDraws
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Row, some

POINTS = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.9]]).double()


@cache
def functions():
    bnn = BayesianModule(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    model = SupervisedModel(bnn, likelihoods.Gaussian(num_data=3, scale=0.1))
    guide = AutoRadial(model)
    guide.setup(POINTS, POINTS[:, :1])
    return SampledNetwork(model, guide, num_samples=3)


ROWS = [
    Row(
        "botorch.FunctionDraws",
        lambda: dict(functions=functions()),
        dict(num_outputs={"two": 2}),
        then=lambda found: found(POINTS),
    ),
    Row(
        "botorch.FunctionDraws.forward",
        lambda: dict(X=POINTS),
        dict(X=some(torch.rand(3, 3).double())),
        takes=dict(X=("all nan", "no rows")),
        on=lambda: FunctionDraws(functions()),
    ),
    Row(
        "botorch.FunctionDraws.draw",
        lambda: dict(index=1),
        dict(index={"too large": 3}),
        on=lambda: FunctionDraws(functions()),
    ),
]
