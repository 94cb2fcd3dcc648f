# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.distributions``."""

import pyro.distributions as dist
import torch

from pyro_radial.distributions import HypersphericalUniform, RadialNormal, VonMisesFisherStable
from tests.calls.sweep import Row, some

UNIT = torch.tensor([0.6, 0.8, 0.0])
REAL = dist.Normal(torch.zeros(3), 1.0).to_event(1)
MAKERS = {
    "RadialNormal": lambda: RadialNormal(torch.zeros(2, 3), torch.ones(2, 3)),
    "VonMisesFisherStable": lambda: VonMisesFisherStable(torch.eye(3), torch.tensor(2.0)),
    "HypersphericalUniform": lambda: HypersphericalUniform(3, (2,)),
}

ROWS = [
    Row(
        "distributions.RadialNormal",
        lambda: dict(loc=torch.zeros(2, 3), scale=torch.ones(2, 3)),
        dict(loc=some(torch.zeros(2, 4)), scale=some(torch.full((2, 3), -1.0)), event_dim={"above the rank": 3}),
        takes=dict(loc=("a dimension too few",), scale=("a dimension too few",)),
    ),
    Row(
        "distributions.VonMisesFisherStable",
        lambda: dict(loc=torch.eye(3), concentration=torch.tensor(2.0)),
        dict(loc=some(torch.ones(3, 3), torch.ones(3, 1)), concentration=some(torch.ones(4))),
        takes=dict(loc=("no rows", "a dimension too few")),
    ),
    Row(
        "distributions.HypersphericalUniform",
        lambda: dict(dim=3, batch_shape=(2,), like=torch.zeros(1)),
        dict(dim=some(0, 1)),
        takes=dict(like=("all nan", "no rows", "a dimension too few")),
    ),
    Row(
        "distributions.RadialNormal.marginal_quantiles",
        lambda: dict(probabilities=[0.25, 0.5]),
        dict(probabilities=some(0.0, [0.5, 1.0])),
        takes=dict(probabilities=("empty",)),
        on=MAKERS["RadialNormal"],
    ),
    Row(
        "distributions.RadialNormal.infer_shapes",
        lambda: dict(loc=torch.Size([5, 3]), scale=torch.Size([3]), event_dim=1),
        dict(loc=some((2,)), scale=some((2,)), event_dim={"above the rank": 3}),
    ),
    Row(
        "distributions.VonMisesFisherStable.infer_shapes",
        lambda: dict(loc=torch.Size([5, 3]), concentration=torch.Size([5])),
        dict(loc=some(()), concentration=some((2,))),
    ),
]
for name, maker in MAKERS.items():
    batch = tuple(maker().batch_shape)
    ROWS += [
        Row(
            f"distributions.{name}.expand",
            lambda batch=batch: dict(batch_shape=(5, *batch)),
            dict(batch_shape=some((5,))),
            on=maker,
        ),
        Row(
            f"distributions.{name}.log_prob",
            lambda: dict(value=UNIT),
            dict(value=some(UNIT[:2])),
            takes=dict(value=("no rows",) if name == "RadialNormal" else ()),
            on=maker,
        ),
        Row(f"distributions.{name}.rsample", lambda: dict(sample_shape=(4,)), on=maker),
    ]
