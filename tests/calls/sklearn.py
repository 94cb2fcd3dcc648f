# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.sklearn``; what is wrong with a table is told in the words of scikit-learn."""

from functools import cache, partial

import numpy as np
import torch
from torch import nn

from pyro_radial.sklearn import BayesianRegressor
from tests.calls.sweep import Row, some

X = np.array([[0.0, 1.0], [1.0, 3.0], [2.0, -1.0], [3.0, 0.5]])
LABELS = np.array([0, 1, 0, 1])
NUMBERS = np.array([1.0, 5.0, 2.0, 3.0])
FAST = {"optim": partial(torch.optim.Adam, lr=0.01), "epochs": 1, "num_samples": 2, "random_state": 0}
NETWORKS = some(nn.Linear(2, 5), nn.Linear(7, 2))


@cache
def regressor():
    return BayesianRegressor(**FAST).fit(X, NUMBERS)


ROWS = [
    Row(
        "sklearn.BayesianClassifier",
        lambda: FAST,
        dict(network=NETWORKS, class_weight=some({2: 1.0}, {0: -1.0}), random_state=some(-1)),
        then=lambda made: made.fit(X, LABELS),
    ),
    Row(
        "sklearn.BayesianRegressor",
        lambda: FAST,
        dict(network=NETWORKS, random_state=some(-1)),
        then=lambda made: made.fit(X, NUMBERS),
    ),
    Row("sklearn.BayesianRegressor.sample_y", lambda: dict(X=X), dict(random_state=some(-1)), on=regressor),
]
