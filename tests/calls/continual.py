# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.continual`` and its plots."""

import math
from functools import cache, partial

import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, RadialELBO, SupervisedModel, fit
from pyro_radial.continual import Coreset, Task, TaskStream, class_split_stream
from pyro_radial.continual.coresets import random_coreset
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.nn import likelihoods
from tests.calls.sweep import (
    Call,
    Lazy,
    flag,
    function,
    non_negative_int,
    optional,
    positive_float,
    positive_int,
    some,
    tensor,
)

NAN, INF = math.nan, math.inf
X = torch.eye(4).repeat(6, 1)
Y = X.argmax(-1)
ADAM = partial(torch.optim.Adam, lr=0.1)
VALUES = torch.tensor([[0.9, NAN], [0.6, 0.8]])


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
    found = chain()
    guide = found.guide(AutoRadial)
    fit(found, guide, (X, Y), epochs=1, batch_size=12, optim=ADAM, progress=False)
    return found, guide


def task():
    return Task("a", (X, Y), (X, Y))


def stream():
    return class_split_stream((X, Y), (X, Y), multi_head=False)


def matrix():
    return AccuracyMatrix.empty(["a", "b"]).with_row(0, [0.9]).with_row(1, [0.6, 0.8])


data = some(None, "x", 3, X, (X,), (X, None), (X, Y[:3]), (X[:0], Y[:0]), (X * NAN, Y))
classified = data | {"real labels": (X, Y.float()), "a label below zero": (X, Y - 1), "no tensors": (None, None)}
names = some(None, 3, "ab", (), (1, 2))
axes = some("x", 3, torch.ones(1))
inputs = tensor | some(3, [[1.0]], X.numpy(), X[:0], X * NAN, torch.tensor(1.0))
seeds = non_negative_int | {"too long": 2**70}
shares = some(None, "x", 1.0, -0.1, NAN, True)

CALLS = [
    Call(
        "continual.measures.AccuracyMatrix.empty",
        lambda: dict(names=["a", "b"]),
        lambda found: bool(found.values.isnan().all()),
        invalid=dict(names=names),
    ),
    Call(
        "continual.measures.AccuracyMatrix.with_row",
        lambda: dict(i=1, accuracies=[0.5, 0.6]),
        lambda found: torch.allclose(found.values[1], torch.tensor([0.5, 0.6]).double()),
        invalid=dict(
            i=non_negative_int | {"too large": 2},
            accuracies=some(None, "x", 0.5, [0.5], [0.5] * 3, [0.5, 2.0], [None, None]),
        ),
        on=matrix,
    ),
    Call(
        "continual.Task",
        lambda: dict(name="a", train=(X, Y), test=(X, Y), validation=None, head=0),
        lambda found: found.name == "a",
        invalid=dict(
            name=some(None, 3, ["a"]), train=data, test=data, validation=optional(data), head=non_negative_int
        ),
    ),
    Call(
        "continual.TaskStream",
        lambda: dict(names=("a",), builders=(task,), num_heads=1, num_outputs=2),
        lambda found: found[0].name == "a",
        invalid=dict(
            names=some(None, 3, "a", (), (1,)),
            builders=some(None, 3, "x", (), (3,), [None], (lambda: None,), (lambda: 3,)),
            num_heads=positive_int,
            num_outputs=positive_int,
        ),
        then=lambda found: (found[0], found)[1],
    ),
    Call(
        "continual.TaskStream.of",
        lambda: dict(tasks=[task()], num_outputs=2, num_heads=1),
        lambda found: found[0].name == "a",
        invalid=dict(tasks=some(None, "x", 3, [], [3], (X, Y)), num_outputs=positive_int, num_heads=positive_int),
    ),
    Call(
        "continual.class_split_stream",
        lambda: dict(
            train=(X, Y),
            test=(X, Y),
            classes_per_task=2,
            multi_head=True,
            validation_fraction=0.25,
            seed=0,
        ),
        lambda found: [task.head for task in found] == [0, 1] and found.num_outputs == 2,
        invalid=dict(
            train=classified,
            test=classified,
            classes_per_task=positive_int | {"another size at the end": 3},
            multi_head=flag,
            validation_fraction=shares,
            seed=seeds,
        ),
    ),
    Call(
        "continual.permuted_stream",
        lambda: dict(train=(X, Y), test=(X, Y), num_tasks=2, validation_fraction=0.25, seed=0),
        lambda found: len(found) == 2 and torch.equal(found[0].test[0], X),
        invalid=dict(
            train=classified,
            test=classified | {"narrower": (X[:, :2], Y)},
            num_tasks=positive_int,
            validation_fraction=shares,
            seed=seeds,
        ),
    ),
    Call(
        "continual.Coreset.choose",
        lambda: dict(x=X, size=3, seed=0),
        lambda found: len(found.unique()) == 3,
        invalid=dict(x=inputs, size=positive_int | {"all": 24}, seed=seeds),
        on=lambda: Coreset(3),
    ),
    Call(
        "continual.Coreset",
        lambda: dict(
            size=3, choose=random_coreset, fit_options={}, use="functions", weight=1.0, max_points=3, inputs="current"
        ),
        lambda found: found.weight == 1.0,
        invalid=dict(
            size=positive_int,
            choose=function,
            fit_options=some(None, "x", 3, {"epochs": 1}),
            use=some(None, "x", 3),
            weight=optional(positive_float),
            max_points=optional(positive_int),
            inputs=some(None, "x", 3),
        ),
        also=(
            ({"weight": None}, lambda found: found.weight == 10.0),
            ({"max_points": None}, lambda found: found.max_points == 200),
        ),
    ),
    Call(
        "continual.Coreset",
        lambda: dict(
            size=3,
            choose=random_coreset,
            fit_options={"epochs": 1},
            use="labels",
            weight=None,
            max_points=None,
            inputs="kept",
        ),
        lambda found: found.use == "labels",
        invalid=dict(
            size=positive_int,
            choose=function,
            fit_options=some(None, "x", 3),
            use=some(None, "x", 3),
            weight=some(1.0, 2.0, "x"),
            max_points=some(1, 2, "x"),
            inputs=some(None, "x", "current"),
        ),
        case="labels",
    ),
    Call(
        "continual.PriorChain",
        lambda: dict(model=model(), form="normal", weight=2.0),
        lambda found: found.prior == {},
        invalid=dict(
            model=some(None, "x", 3, Lazy(untrained)), form=some(None, "x", 3, "exact"), weight=positive_float
        ),
    ),
    Call(
        "continual.PriorChain.guide",
        lambda: dict(guide_type=AutoRadial, reset_scales=True),
        lambda found: isinstance(found, AutoRadial),
        invalid=dict(
            guide_type=function | some(Lazy(untrained), nn.Linear(4, 4), lambda m: 3, lambda m: None), reset_scales=flag
        ),
        on=chain,
        unchecked={"kwargs": "other arguments of the guide"},
    ),
    Call(
        "continual.PriorChain.advance",
        lambda: dict(guide=trained()[1], exclude="bias"),
        lambda found: found is None,
        invalid=dict(
            guide=some(None, "x", 3, {}, AutoRadial, nn.Linear(1, 1), Lazy(untrained)),
            exclude=some(3, 1.5, "(", [3]),
        ),
        also=(({"exclude": None}, lambda found: found is None),),
        on=chain,
    ),
    Call(
        "continual.train_stream",
        lambda: dict(
            chain=chain(),
            stream=stream(),
            guide=lambda chain: chain.guide(AutoMeanField),
            coreset=Coreset(2),
            first_task={"epochs": 1},
            measure_on="test",
            num_samples=2,
            seed=0,
            checkpoint=None,
            progress=False,
            fit_options=dict(epochs=1, batch_size=12, optim=ADAM, loss=RadialELBO()),
        ),
        lambda found: found.values.shape == (2, 2) and found.names == ("classes 0, 1", "classes 2, 3"),
        invalid=dict(
            chain=some(None, "x", 3, Lazy(model), PriorChain, Lazy(lambda: PriorChain(lambda x, y: None))),
            stream=some(None, "x", 3, [], Lazy(lambda: [task()]), TaskStream),
            guide=some("x", 3, Lazy(untrained), lambda chain: None, lambda chain: 3),
            coreset=some("x", 3, {"size": 3}, Coreset(100), Coreset),
            first_task=some("x", 3, {"seed": 1}, {"num_data": 1}),
            measure_on=some(None, "x", 3),
            num_samples=positive_int,
            seed=seeds,
            checkpoint=some(3, 1.5, torch.ones(1)),
            progress=flag,
        ),
        also=tuple(
            ({name: None}, lambda found: found.values.shape == (2, 2)) for name in ("guide", "coreset", "first_task")
        ),
        unchecked={"fit_options": "other arguments of fit"},
    ),
    Call(
        "continual.plots.plot_accuracy_matrix",
        lambda: dict(matrix=matrix(), ax=None),
        lambda ax: [label.get_text() for label in ax.texts] == ["0.900", "0.600", "0.800"],
        invalid=dict(matrix=some(None, "x", 3, VALUES), ax=axes),
    ),
]
