# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.sklearn``; what is wrong with a table is told in the words of scikit-learn."""

from functools import cache, partial

import numpy as np
import torch
from torch import nn

from pyro_radial.sklearn import BayesianClassifier, BayesianRegressor
from tests.calls.sweep import Row, some

X = np.array([[0.0, 1.0], [1.0, 3.0], [2.0, -1.0], [3.0, 0.5]])
LABELS = np.array([0, 1, 0, 1])
NUMBERS = np.array([1.0, 5.0, 2.0, 3.0])
FAST = {"optim": partial(torch.optim.Adam, lr=0.01), "epochs": 1, "num_samples": 2, "random_state": 0}
TABLES = ("X", "y", "sample_weight")
NETWORKS = some(nn.Linear(2, 5), nn.Linear(7, 2), lambda features, outputs: None)


@cache
def classifier():
    return BayesianClassifier(**FAST).fit(X, LABELS)


@cache
def regressor():
    return BayesianRegressor(**FAST).fit(X, NUMBERS)


ROWS = [
    Row(
        "sklearn.BayesianClassifier",
        lambda: FAST,
        dict(network=NETWORKS, class_weight=some({2: 1.0}, {0: -1.0}), random_state=some(-1)),
        takes=dict(random_state=("number", "flag")),
        then=lambda made: made.fit(X, LABELS),
    ),
    Row(
        "sklearn.BayesianClassifier.fit",
        lambda: dict(X=X, y=LABELS),
        unread=TABLES,
        on=lambda: BayesianClassifier(**FAST),
    ),
    Row("sklearn.BayesianClassifier.predict", lambda: dict(X=X), unread=TABLES, on=classifier),
    Row("sklearn.BayesianClassifier.predict_proba", lambda: dict(X=X), unread=TABLES, on=classifier),
    Row(
        "sklearn.BayesianRegressor",
        lambda: FAST,
        dict(network=NETWORKS, random_state=some(-1)),
        takes=dict(random_state=("number", "flag")),
        then=lambda made: made.fit(X, NUMBERS),
    ),
    Row(
        "sklearn.BayesianRegressor.fit",
        lambda: dict(X=X, y=NUMBERS),
        unread=TABLES,
        on=lambda: BayesianRegressor(**FAST),
    ),
    Row("sklearn.BayesianRegressor.predict", lambda: dict(X=X), unread=TABLES, on=regressor),
    Row(
        "sklearn.BayesianRegressor.sample_y",
        lambda: dict(X=X),
        dict(random_state=some(-1)),
        takes=dict(random_state=("number", "flag", "None")),
        unread=TABLES,
        on=regressor,
    ),
]

# Scikit-learn makes these for the routing of metadata.
NOT_CALLED = {
    *(f"sklearn.BayesianClassifier.set_{name}_request" for name in ("fit", "score")),
    *(f"sklearn.BayesianRegressor.set_{name}_request" for name in ("fit", "predict", "score")),
}
