# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small training problems, ways to interrupt a run, and a Dataset, that the tests of training share."""

import re
from contextlib import contextmanager
from dataclasses import fields

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from torch import nn
from torch.utils.data import Dataset

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FunctionalELBO, SupervisedModel, TermsELBO, fit
from pyro_radial.functional import GaussianKL, GaussianProcess, UniformBox
from pyro_radial.infer.data import Batches, Rows
from pyro_radial.infer.step.optimizer import DEFAULT_OPTIM
from pyro_radial.infer.training.checkpoint import copy_state
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.infer.training.training_run import TrainingRun
from pyro_radial.nn import likelihoods

ROWS = 20
FIT = {"epochs": 3, "batch_size": 6, "seed": 5, "progress": False}
STEPS_PER_EPOCH = 4

NETS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)),
}


def data(rows=ROWS, seed=3):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(-1) > 0).long()


def problem(net="plain", guide=AutoRadial, likelihood=None):
    """The same model and guide at every call."""
    torch.manual_seed(1)
    model = SupervisedModel(BayesianModule(NETS[net]()), likelihood or likelihoods.Categorical(num_data=ROWS))
    return model, guide(model)


class Described(SupervisedModel):
    """A model with state that is no tensor: its name, and how many rows each call has seen in training."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def forward(self, x, y=None):
        if self.training and y is not None:
            self.seen.append(len(y))
        return super().forward(x, y)

    def get_extra_state(self):
        # The very list, so that who keeps it without a copy sees it grow.
        return {"name": "described", "seen": self.seen}

    def set_extra_state(self, state):
        self.seen = list(state["seen"])


def described_problem(net="plain", guide=AutoRadial):
    """As :func:`problem`, with a model whose state is not only tensors."""
    torch.manual_seed(1)
    model = Described(BayesianModule(NETS[net]()), likelihoods.Categorical(num_data=ROWS))
    return model, guide(model)


def function_problem():
    """A model that is a plain function, with a parameter of its own and another one in a closure."""
    pyro.clear_param_store()
    torch.manual_seed(1)
    bnn = BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)))

    def model(x, y=None):
        f = bnn(x).squeeze(-1)
        scale = pyro.param("noise", lambda: torch.tensor(0.7), constraint=constraints.positive)
        with pyro.plate("data", ROWS if y is not None else len(x), subsample=torch.arange(len(x))):
            f = pyro.deterministic("f", f)
            pyro.sample("y", dist.Normal(f, scale), obs=None if y is None else y.to(f.dtype))

    return model, AutoRadial(model)


def targets(rows=ROWS):
    """Inputs and real-valued targets."""
    x, _ = data(rows)
    return x, x.sum(-1, keepdim=True).tanh().repeat(1, 2)


def regression(guide=AutoMeanField):
    """As :func:`problem`, with targets of :func:`targets`."""
    return problem(guide=guide, likelihood=likelihoods.Gaussian(num_data=ROWS, scale=0.3))


def functional_loss(measurement_points=None):
    """A loss with a prior on functions, and by default points drawn anew at each step."""
    prior = GaussianProcess(lambda a, b: (-0.5 * torch.cdist(a, b) ** 2).exp(), noise=0.1)
    measurement_points = UniformBox(-2.0, 2.0, num_points=3) if measurement_points is None else measurement_points
    return FunctionalELBO(prior, measurement_points, divergence=GaussianKL(), num_functions=40)


class WalkingPoints:
    """Points that take a random step at each call, and so have a state."""

    def __init__(self):
        self.points = torch.zeros(3, 1)

    def __call__(self, x):
        self.points = self.points + 0.1 * torch.randn_like(self.points)
        return self.points.to(x).expand(-1, x.shape[1])

    def state_dict(self):
        return {"points": self.points}

    def load_state_dict(self, state):
        self.points = state["points"]


def walking_loss():
    """A loss with a prior on functions, at points that walk."""
    return functional_loss(WalkingPoints())


def rates(name):
    """Settings by the name of a parameter: scales ten times as fast and with more memory, all else decays."""
    return {"lr": 1e-2, "betas": (0.8, 0.99)} if "scales" in name else {"lr": 1e-3, "weight_decay": 0.1}


class Counting:
    """A schedule that counts its own calls, and so has a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return min(1.0, self.calls / 50)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def state_of(model, guide):
    state = {f"guide.{name}": value for name, value in guide.state_dict().items()}
    if isinstance(model, nn.Module):
        state |= {f"model.{name}": value for name, value in model.state_dict().items()}
    else:
        store = pyro.get_param_store()
        # A guide's name in the store differs from instance to instance, and its values are in its state.
        state |= {name: store[name].detach() for name in store if not name.startswith("Auto")}
        state = {re.sub("BayesianModule[_0-9]*", "bnn", name): value for name, value in state.items()}
    return copy_state(state)


def assert_same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


OPTIONS = {field.name for field in fields(FitOptions)}


def trained(model, guide, **kwargs):
    """A run of ``fit`` with arguments and options alike, and the state that it leaves."""
    given = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
    kwargs.setdefault("options", FitOptions(**given))
    result = fit(model, guide, kwargs.pop("data", data()), **{**FIT, **kwargs})
    return state_of(model, guide), result


def run_on(model, guide, batch, **settings):
    """A run of ``fit`` that has taken no step, each of which is on the same batch."""
    rows = Rows(batch, "data")
    settings = {"optim": DEFAULT_OPTIM, "options": FitOptions(), **settings}
    batches = Batches(rows, len(rows), 0, batch[1].device)
    batches.get = lambda *_: batch
    return TrainingRun(model, guide, TermsELBO(), batches, **settings)


@contextmanager
def killed(monkeypatch, method, at, when):
    """Interrupts the ``at``-th call of a method of the run, before or after it has done its work."""
    owner, method = TrainingRun, {"gradients": "_evaluate"}.get(method, method)
    original, calls = getattr(owner, method), 0

    def interrupted(self, *args):
        nonlocal calls
        calls += 1
        if calls == at and when == "before":
            raise KeyboardInterrupt
        value = original(self, *args)
        if calls == at:
            raise KeyboardInterrupt
        return value

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


class Items(Dataset):
    """A map-style ``Dataset`` of whatever is in a list."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]
