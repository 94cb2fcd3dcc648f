# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.compression``."""

from functools import cache

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Lazy, Row, some

X, Y = torch.linspace(-1, 1, 80).reshape(20, 4).sin(), torch.arange(20) % 2


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@cache
def model_and_guide():
    model = SupervisedModel(BayesianModule(network()), likelihoods.Categorical())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return model, guide


def bnn():
    return model_and_guide()[0].bnn


def trained():
    return model_and_guide()[1]


guides = some(Lazy(lambda: AutoRadial(model_and_guide()[0])))
UNTRAINED = (RuntimeError, TypeError, ValueError)

ROWS = [
    Row(
        "compression.PosteriorImportance",
        lambda: dict(network=network(), guide=trained()),
        dict(guide=guides),
        errors=UNTRAINED,
    ),
    Row("compression.mean_network", lambda: dict(bnn=bnn(), guide=trained()), dict(guide=guides), errors=UNTRAINED),
    Row(
        "compression.prune",
        lambda: dict(model=model_and_guide()[0], guide=trained(), data=(X, Y), tolerance=100.0, num_cuts=3),
        dict(guide=guides, data={"a label too large": (X, Y + 5)}, num_cuts={"one": 1}),
        errors=UNTRAINED,
    ),
]
