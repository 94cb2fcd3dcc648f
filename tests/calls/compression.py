# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.compression``."""

from functools import cache

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Lazy, Row, some

X, Y = torch.linspace(-1, 1, 80).reshape(20, 4).sin(), torch.arange(20) % 2


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def a_cut():
    return Cut({"0": torch.tensor([True, False, True])})


def some_scores():
    return Scores({"0": torch.tensor([0.0, 1.0, 2.0])})


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


countable = some(nn.Sequential(), nn.Sequential(nn.ReLU()), nn.Sequential(nn.LSTM(2, 2)))
cuts = some(Cut({"zzz": torch.tensor([True])}), Cut({"0": torch.tensor([True])}))
scores = some(Scores({"zzz": torch.zeros(1)}), Scores({"0": torch.zeros(1)}))
of_network = dict(net=countable | some(nn.Linear(2, 2)), cut=cuts, scores=scores)
guides = some(Lazy(lambda: AutoRadial(model_and_guide()[0])))
UNTRAINED = (RuntimeError, TypeError, ValueError)

ROWS = [
    Row("compression.cut_network", lambda: dict(net=network(), cut=a_cut(), scores=some_scores()), of_network),
    Row(
        "compression.mean_network",
        lambda: dict(bnn=bnn(), guide=trained()),
        dict(guide=guides),
        errors=UNTRAINED,
    ),
    Row(
        "compression.prune",
        lambda: dict(model=model_and_guide()[0], guide=trained(), data=(X, Y), tolerance=100.0, num_cuts=3),
        dict(
            guide=guides,
            data={"a label too large": (X, Y + 5)},
            num_cuts={"one": 1},
        ),
        errors=UNTRAINED,
    ),
    Row("compression.unit_scores", lambda: dict(guide=trained()), dict(guide=guides), errors=UNTRAINED),
]
