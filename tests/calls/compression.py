# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.compression``."""

import math
from functools import cache

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Call, Lazy, non_negative_float, positive_int, some

NAN = math.nan
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


def untrained():
    return AutoRadial(model_and_guide()[0])


networks = some(
    *(None, "x", 3, network, nn.Sequential, nn.Sequential(), nn.Sequential(nn.ReLU()), nn.Sequential(nn.LSTM(2, 2)))
) | {"not sequential": nn.Linear(2, 2)}
cuts = some(
    None, "x", 3, {"0": torch.tensor([True, False, True])}, Cut({"zzz": torch.tensor([True])}), some_scores()
) | {"of another layer": Cut({"0": torch.tensor([True])})}
scores = some("x", 3, {"0": torch.zeros(3)}, Scores({"zzz": torch.zeros(1)}), Scores({"0": torch.zeros(1)}), a_cut())
guides = some(None, "x", 3, AutoRadial, nn.Linear(1, 1), Lazy(untrained))


def has_two_units(net):
    return net[0].out_features == 2 and net[2].in_features == 2


CALLS = [
    Call(
        "compression.cut_network",
        lambda: dict(net=network(), cut=a_cut(), scores=some_scores()),
        has_two_units,
        invalid=dict(net=networks, cut=cuts, scores=scores),
        also=(({"scores": None}, has_two_units),),
    ),
    Call(
        "compression.mean_network",
        lambda: dict(bnn=model_and_guide()[0].bnn, guide=model_and_guide()[1]),
        lambda net: net(X).shape == (20, 2),
        invalid=dict(
            bnn=some(None, "x", 3, network(), BayesianModule, Lazy(lambda: model_and_guide()[0])), guide=guides
        ),
        errors=(RuntimeError, ValueError),
    ),
    Call(
        "compression.prune",
        lambda: dict(model=model_and_guide()[0], guide=model_and_guide()[1], data=(X, Y), tolerance=100.0, num_cuts=3),
        lambda found: found.record.weights == 3 and found.path[0].weights == 18,
        invalid=dict(
            model=some(None, "x", 3, network(), SupervisedModel, Lazy(lambda: model_and_guide()[0].bnn)),
            guide=guides,
            data=some(
                None, "x", 3, (X,), (X, None), (X, Y[:3]), (X[:0], Y[:0]), (X * NAN, Y), (X, Y + 5), (X[:, :3], Y)
            ),
            tolerance=non_negative_float | {"flag": True},
            num_cuts=positive_int | {"one": 1},
        ),
        errors=(RuntimeError, ValueError),
    ),
    Call(
        "compression.unit_scores",
        lambda: dict(guide=model_and_guide()[1]),
        lambda found: set(found.outputs) == {"0"} and set(found.inputs) == {"0", "2"},
        invalid=dict(guide=guides),
        errors=(RuntimeError, ValueError),
    ),
]
