# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.poutine``."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_radial.infer.autoguide.guides import AutoRadial
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.poutine.local_reparameterization import LocalReparameterizationMessenger
from pyro_radial.poutine.mean_only import MeanOnlyMessenger
from tests.calls.sweep import NONE, STRANGER, Call, Part, function, mapping, optional

X = torch.zeros(4, 3)


def model(x=X):
    return pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))


def network():
    return BayesianModule(nn.Linear(3, 1))


def guide():
    made = AutoRadial(network())
    made.setup(X)
    return made


def own_guide(x):
    pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))


def run_once(handled):
    """Run a handled guide, but not a handler."""
    if not isinstance(handled, LocalReparameterizationMessenger):
        handled(X)
    return handled


CALLS = [
    Call(
        "poutine.mean_only",
        lambda: dict(guide=guide()),
        lambda found: bool((found(X)["weight"] == found(X)["weight"]).all()),
        invalid=dict(guide=optional(function) | {"stranger": STRANGER}),
        also=(({"guide": None}, lambda found: isinstance(found, MeanOnlyMessenger)),),
    ),
    Call(
        "poutine.local_reparameterization",
        lambda: dict(guide=own_guide, sites=["weight"]),
        lambda found: found(X) is None,
        then=run_once,
        invalid=dict(
            guide=optional(function) | {"stranger": STRANGER},
            sites={**NONE, "number": 3, "text": "weight", "unknown": ["bias"], "numbers": [3]},
        ),
        also=(({"guide": None}, lambda found: isinstance(found, LocalReparameterizationMessenger)),),
    ),
    Call(
        "poutine.swap_prior",
        lambda: dict(model=model, priors={"w": dist.Laplace(torch.full((3,), 50.0), 0.1).to_event(1)}),
        lambda found: bool((found > 25.0).all()),
        then=lambda found: found(X),
        invalid=dict(
            model=function,
            priors=mapping
            | {
                "number for a site": Part("w", {"w": 1.0}),
                "unknown site": {"v": dist.Normal(0.0, 1.0)},
                "another shape": Part("w", {"w": dist.Normal(torch.zeros(2), 1.0).to_event(1)}),
                "another support": Part("w", {"w": dist.HalfNormal(torch.ones(3)).to_event(1)}),
            },
        ),
    ),
]
