# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A small stream to learn, and a way to kill a run, that the tests of learning share."""

from functools import partial
from importlib import import_module

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.continual import Coreset, PriorChain, train_stream
from pyro_radial.infer.training.checkpoint import copy_state
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.nn import MultiHead, likelihoods
from tests.helpers.runs import OPTIONS as FIT_OPTIONS
from tests.helpers.runs import assert_same as assert_same_state
from tutorials.streams import class_split_stream

#: The module, which has the name of its function.
MODULE = import_module("pyro_radial.continual.train_stream")
OPTIONS = {
    "epochs": 2,
    "batch_size": 16,
    "optim": partial(torch.optim.Adam, lr=0.1),
    "num_samples": 3,
    "seed": 3,
    "progress": False,
}
ROWS = 24  # of each task to learn from.


CORESET = Coreset(6, fit_options={"epochs": 1})


def clusters(rows, seed):
    """Rows around four points, one for each class, so far apart that a linear network tells them."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % 4
    return 3.0 * torch.eye(4)[y] + 0.3 * torch.randn(rows, 4, generator=generator), y


def stream(multi_head=True, **kwargs):
    return class_split_stream(clusters(2 * ROWS, 0), clusters(16, 1), multi_head=multi_head, **kwargs)


def chain(multi_head=True, width=5, **kwargs):
    """A chain around a network with layers that are trained, though not random, and keep statistics."""
    torch.manual_seed(1)
    # A bias before a batch norm is of no effect.
    trunk = nn.Sequential(nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.Tanh())
    net = MultiHead(trunk, [nn.Linear(width, 2) for _ in range(2)]) if multi_head else trunk.append(nn.Linear(width, 4))
    return PriorChain(SupervisedModel(BayesianModule(net, dist.Normal(0.0, 1.0)), likelihoods.Categorical()), **kwargs)


def learn(one=None, tasks=None, **options):
    """A run, as what must not differ between two of them: the matrix and the chain."""
    one = chain() if one is None else one
    if given := {name: options.pop(name) for name in FIT_OPTIONS & options.keys()}:
        options["options"] = FitOptions(**given)
    pyro.set_rng_seed(torch.seed() % 1000)  # What was drawn before does not matter.
    matrix = train_stream(one, stream() if tasks is None else tasks, **{**OPTIONS, **options})
    return matrix, copy_state(one.state_dict())


def assert_same(one, other):
    (matrix, state), (other_matrix, other_state) = one, other
    assert torch.equal(matrix.values.nan_to_num(-1.0), other_matrix.values.nan_to_num(-1.0))
    assert_same_state(state, other_state)


class Killed(BaseException):
    """No error that anything would catch."""


def kill(patch, owner, name, at, when):
    """The ``at``-th call, from one, of a function is the last, before or after it has done its work."""
    original, count = getattr(owner, name), 0

    def interrupted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at and when == "before":
            raise Killed
        result = original(*args, **kwargs)
        if count == at:
            raise Killed
        return result

    patch.setattr(owner, name, interrupted)


def killed(monkeypatch, one, *where, **options):
    with monkeypatch.context() as patch:
        kill(patch, *where)
        with pytest.raises(Killed):
            learn(one, **options)
