# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of guides and their families."""

import math

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import priors
from tests.calls.sweep import Row, some

X = torch.zeros(4, 3)
NAN = torch.full((2, 3), math.nan)


def bayesian():
    return BayesianModule(nn.Linear(3, 2), dist.Normal(0.0, 1.0))


def directional():
    return BayesianModule(nn.Linear(3, 2), priors.RadialDirectionalPrior())


def ready(guide):
    """The guide with its parameters; most arguments are read here."""
    guide.setup(X)
    return guide


def guide():
    return ready(AutoRadial(bayesian()))


def site():
    """A site in Pyro's trace of a model."""
    return pyro.poutine.trace(bayesian()).get_trace(X).nodes["weight"]


shared = {"families": some({"gain": families.Normal()}, {"(": families.Normal()})}
event_dims = some(3, {"gain": 1}, {"bias": 2})

ROWS = [
    Row("infer.autoguide.AutoPerSite", lambda: dict(model=bayesian())),
    Row("infer.autoguide.AutoMeanField", lambda: dict(model=bayesian()), shared, then=ready),
    Row(
        "infer.autoguide.AutoRadial",
        lambda: dict(model=bayesian(), event_dim={"weight": 1}),
        shared | dict(event_dim=event_dims),
        then=ready,
    ),
    Row("infer.autoguide.AutoRadialDirectional", lambda: dict(model=directional()), shared, then=ready),
    Row(
        "infer.autoguide.AutoPerSite.quantiles",
        lambda: dict(quantiles=[0.25, 0.5], args=(), sites=["bias"]),
        dict(quantiles=some([0.0], [1.0]), sites=some(["gain"])),
        takes=dict(quantiles=("empty",), sites=("empty",)),
        on=guide,
    ),
    Row(
        "infer.autoguide.AutoPerSite.load_means",
        lambda: dict(state_dict={"weight": torch.ones(2, 3)}, strict=False),
        dict(state_dict=some({"weight": torch.ones(3, 3)}, {"weight": NAN})),
        on=guide,
    ),
    Row(
        "infer.autoguide.AutoPerSite.set_stddevs",
        lambda: dict(stddevs={"weight": torch.tensor(0.5)}),
        dict(
            stddevs=some(
                *({"weight": torch.ones(5)}, {"weight": torch.zeros(2, 3)}, {"weight": NAN}, {"gain": torch.ones(2, 3)})
            )
        ),
        on=guide,
    ),
    Row(
        "infer.autoguide.AutoPerSite.load_state_dict",
        lambda: dict(state_dict=guide().state_dict()),
        dict(state_dict=some({})),
        on=guide,
        errors=(TypeError, ValueError, RuntimeError),
    ),
    Row(
        "infer.autoguide.init_to_network",
        lambda: dict(site=site(), net=nn.Linear(3, 2)),
        dict(net=some(nn.Linear(2, 2))),
    ),
    *(
        Row(f"infer.autoguide.families.{family}")
        for family in ("LocScale", "MultivariateNormal", "Normal", "Radial", "Directional", "VonMisesFisher")
    ),
]
