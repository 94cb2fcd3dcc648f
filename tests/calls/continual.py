# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.continual`` and its plots."""

import copy
import math
from functools import cache, partial

import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, SupervisedModel, fit
from pyro_radial.continual import Coreset, Task, TaskStream, train_stream
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Lazy, Row, some
from tutorials.streams import class_split_stream

NAN = math.nan
X = torch.eye(4).repeat(6, 1)
Y = X.argmax(-1)
ADAM = partial(torch.optim.Adam, lr=0.1)


def model():
    return SupervisedModel(BayesianModule(nn.Linear(4, 4)), likelihoods.Categorical())


def chain():
    return PriorChain(model())


def untrained():
    guide = chain().guide(AutoRadial)
    guide.setup(X, Y)
    return guide


@cache
def trained():
    made = chain()
    guide = made.guide(AutoRadial)
    fit(made, guide, (X, Y), epochs=1, batch_size=12, optim=ADAM, progress=False)
    return made, guide


@cache
def learned_once():
    made = chain()
    one_task = TaskStream.of([task()], num_outputs=4)
    matrix = train_stream(made, one_task, num_samples=2, epochs=1, batch_size=12, optim=ADAM, progress=False)
    return made, matrix


def learned():
    """A chain that has learned one task, and its matrix."""
    made, matrix = learned_once()
    return copy.deepcopy(made), matrix


def task():
    return Task("a", (X, Y), (X, Y))


ROWS = [
    Row("continual.Task", lambda: dict(name="a", train=(X, Y), test=(X, Y), validation=(X, Y))),
    Row(
        "continual.TaskStream",
        lambda: dict(names=("a",), builders=(task,), num_heads=1, num_outputs=2),
        then=lambda stream: stream[0],
    ),
    Row("continual.TaskStream.of", lambda: dict(tasks=[task()], num_outputs=2)),
    Row(
        "continual.Coreset.choose",
        lambda: dict(x=X, size=3),
        dict(size={"all": 24}, x=some(torch.tensor(1.0))),
        takes=dict(x=("a dimension too few",)),
        on=lambda: Coreset(3),
    ),
    Row(
        "continual.Coreset",
        lambda: dict(size=3, use="functions", fit_options={}),
        dict(fit_options={"of labels": {"epochs": 1}}),
    ),
    Row(
        "continual.Coreset",
        lambda: dict(size=3, fit_options={"epochs": 1}),
        dict(weight=some(1.0), max_points=some(1), inputs=some("current")),
        case="labels",
    ),
    Row("continual.PriorChain", lambda: dict(model=model(), weight=2.0), dict(form={"with a weight": "exact"})),
    Row(
        "continual.PriorChain.advance",
        lambda: dict(guide=trained()[1], exclude="bias"),
        dict(guide=some(Lazy(untrained)), exclude=some("(")),
        on=chain,
    ),
    Row(
        "continual.train_stream",
        lambda: dict(
            chain=chain(),
            stream=class_split_stream((X, Y), (X, Y), multi_head=False),
            guide=lambda chain: chain.guide(AutoMeanField),
            coreset=Coreset(2),
            num_samples=2,
            fit_options=dict(epochs=1, batch_size=12, optim=ADAM),
        ),
        dict(
            coreset=some(Coreset(100)),
            first_task=some({"seed": 1}, {"num_data": 1}),
            after=some(Lazy(lambda: learned()[1]), AccuracyMatrix.empty(["a"])),
        ),
    ),
    Row(
        "continual.train_stream",
        lambda: dict(
            chain=learned()[0],
            stream=TaskStream.of([task(), Task("b", (X, Y), (X, Y))], num_outputs=4),
            after=learned()[1],
            forward_transfer=True,
            num_samples=2,
            fit_options=dict(epochs=1, batch_size=12, optim=ADAM),
        ),
        dict(
            stream=some(Lazy(lambda: TaskStream.of([Task("b", (X, Y), (X, Y))], num_outputs=4))),
            chain=some(Lazy(chain)),
            coreset=some(Coreset(2)),
        ),
        case="more tasks",
    ),
    Row("continual.recipes.nothing_kept", lambda: dict(heads=True)),
    Row("continual.recipes.functions", lambda: dict(size=3, heads=True)),
]
