# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.infer.Ensemble``."""

import math
from functools import cache, partial

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer import Ensemble
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Call, Part, flag, function, non_negative_int, positive_int, some

X, Y = torch.linspace(-1, 1, 24).reshape(12, 2), torch.arange(12) % 3
SETTINGS = dict(epochs=1, batch_size=6, optim=partial(torch.optim.Adam, lr=0.1))


def make(seed):
    model = SupervisedModel(BayesianModule(nn.Linear(2, 3)), likelihoods.Categorical())
    return model, AutoRadial(model)


PAIR = make(0)


@cache
def trained():
    found = Ensemble(make, size=2)
    found.fit((X, Y), progress=False, **SETTINGS)
    return found


def train(ensemble):
    ensemble.fit((X, Y), progress=False, **SETTINGS)
    return ensemble


CALLS = [
    Call(
        "infer.Ensemble",
        lambda: dict(make=make, size=2, seed=0),
        lambda found: len(found.members) == 2,
        invalid=dict(
            make=function
            | some(
                PAIR, lambda seed: None, lambda seed: 3, lambda seed: (1, 2), lambda seed: PAIR, lambda seed: PAIR[0]
            ),
            size=positive_int,
            seed=non_negative_int,
        ),
        then=train,
    ),
    Call(
        "infer.Ensemble.fit",
        lambda: dict(data=(X, Y), checkpoint=None, progress=False, settings=SETTINGS),
        lambda found: len(found) == 2,
        invalid=dict(
            data=some(None, "x", 3, (X,), (X, None), (X, Y[:3]), (X * math.nan, Y)),
            checkpoint=some(3, 1.5, torch.ones(1)),
            progress=flag,
            settings={str(seed): Part("seed", {"seed": seed}) for seed in (0, 1, None)},
        ),
        on=lambda: Ensemble(make, size=2),
    ),
    Call(
        "infer.Ensemble.predict",
        lambda: dict(x=X, num_samples=2, chunk_size=6),
        lambda found: found.samples.shape == (4, 12, 3),
        invalid=dict(
            x=some(None, "x", 3, X[:0], X * math.nan, torch.rand(3, 5)),
            num_samples=positive_int,
            chunk_size=positive_int,
        ),
        on=trained,
        unchecked={"options": "other arguments of predict"},
    ),
]
