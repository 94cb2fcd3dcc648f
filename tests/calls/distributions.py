# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.distributions``."""

import math

import pyro.distributions as dist
import torch

from pyro_radial.distributions import HypersphericalUniform, RadialDirectional, RadialNormal, VonMisesFisherStable
from tests.calls.sweep import NONE, STRANGER, Call, distribution, flag, non_negative_int, optional, shape, tensor

real = tensor | {"integers": torch.zeros(2, 3, dtype=torch.long)}
validated = optional(flag)
event_dim = non_negative_int | {"above the rank": 3}


def radial():
    return RadialNormal(torch.zeros(2, 3), torch.ones(2, 3))


def directions():
    return VonMisesFisherStable(torch.eye(3), torch.tensor(2.0))


def uniform():
    return HypersphericalUniform(3, (2,))


def radial_directional():
    return RadialDirectional(dist.LogNormal(torch.zeros(2), 0.1), HypersphericalUniform(3))


def has_shapes(*expected):
    return lambda found: (tuple(found.batch_shape), tuple(found.event_shape)) == expected


def shaped(*expected):
    return lambda found: tuple(found.shape) == expected and bool(found.isfinite().all())


UNIT = torch.tensor([0.6, 0.8, 0.0])

CALLS = [
    Call(
        "distributions.RadialNormal",
        lambda: dict(loc=torch.zeros(2, 3), scale=torch.ones(2, 3), event_dim=1, validate_args=True),
        has_shapes((2,), (3,)),
        invalid=dict(
            loc=real | {"nan": torch.full((2, 3), math.nan), "another shape": torch.zeros(2, 4)},
            scale=real | {"zero": 0.0, "negative": torch.full((2, 3), -1.0), "inf": math.inf, "nan": math.nan},
            event_dim=event_dim,
            validate_args=validated,
        ),
        also=(({"validate_args": None}, has_shapes((2,), (3,))), ({"event_dim": 0}, has_shapes((2, 3), ()))),
    ),
    Call(
        "distributions.VonMisesFisherStable",
        lambda: dict(loc=torch.eye(3), concentration=torch.tensor(2.0), validate_args=True),
        has_shapes((3,), (3,)),
        invalid=dict(
            loc=real | {"too long": torch.ones(3, 3), "one dimension": torch.ones(3, 1), "number": 1.0},
            concentration=real | {"negative": -1.0, "inf": math.inf, "nan": math.nan, "another shape": torch.ones(4)},
            validate_args=validated,
        ),
        also=(({"validate_args": None}, has_shapes((3,), (3,))), ({"concentration": 0}, has_shapes((3,), (3,)))),
    ),
    Call(
        "distributions.HypersphericalUniform",
        lambda: dict(dim=3, batch_shape=(2,), like=torch.zeros(1, dtype=torch.float64), validate_args=True),
        lambda found: found.sample().dtype == torch.float64 and tuple(found.sample().shape) == (2, 3),
        invalid=dict(
            dim=non_negative_int | {"one": 1, "zero": 0},
            batch_shape=shape,
            like=optional(real) | {"number": 1.0},
            validate_args=validated,
        ),
        also=(({"like": None}, has_shapes((2,), (3,))), ({"validate_args": None}, has_shapes((2,), (3,)))),
    ),
    Call(
        "distributions.RadialDirectional",
        lambda: dict(
            radius=dist.LogNormal(torch.zeros(2), 0.1), direction=HypersphericalUniform(3), validate_args=True
        ),
        has_shapes((2,), (3,)),
        invalid=dict(
            radius=distribution
            | {"real": dist.Normal(0.0, 1.0), "vector": dist.LogNormal(torch.zeros(2), 0.1).to_event(1)},
            direction=distribution
            | {"real": dist.Normal(torch.zeros(3), 1.0).to_event(1), "three": HypersphericalUniform(3, (3,))},
            validate_args=validated,
        ),
        also=(({"validate_args": None}, has_shapes((2,), (3,))),),
    ),
]
for make, name in (
    (radial, "RadialNormal"),
    (directions, "VonMisesFisherStable"),
    (uniform, "HypersphericalUniform"),
    (radial_directional, "RadialDirectional"),
):
    batch = tuple(make().batch_shape)
    draws = ["rsample", "sample"] if name == "RadialDirectional" else ["rsample"]
    CALLS += [
        Call(
            f"distributions.{name}.expand",
            lambda batch=batch: dict(batch_shape=(5, *batch)),
            has_shapes((5, *batch), (3,)),
            invalid=dict(batch_shape=shape | {"another size": (5,)}),
            on=make,
        ),
        Call(
            f"distributions.{name}.log_prob",
            lambda: dict(value=UNIT),
            shaped(*batch),
            invalid=dict(value=tensor | {"another size": UNIT[:2], "nan": UNIT * math.nan, "number": 1.0}),
            on=make,
        ),
        *(
            Call(
                f"distributions.{name}.{draw}",
                lambda: dict(sample_shape=(4,)),
                shaped(4, *batch, 3),
                invalid=dict(sample_shape=shape),
                on=make,
            )
            for draw in draws
        ),
    ]
CALLS += [
    Call(
        "distributions.RadialNormal.marginal_quantiles",
        lambda: dict(probabilities=[0.25, 0.5]),
        lambda found: found.shape == (2, 2, 3) and bool((found[0] < 0).all()) and bool((found[1] == 0).all()),
        invalid=dict(probabilities={**NONE, "text": "two", "stranger": STRANGER, "zero": 0.0, "one": [0.5, 1.0]}),
        on=radial,
    ),
    Call(
        "distributions.RadialNormal.infer_shapes",
        lambda: dict(loc=torch.Size([5, 3]), scale=torch.Size([3]), event_dim=1),
        lambda found: found == ((5,), (3,)),
        invalid=dict(loc=shape | {"another size": (2,)}, scale=shape | {"another size": (2,)}, event_dim=event_dim),
    ),
    Call(
        "distributions.VonMisesFisherStable.infer_shapes",
        lambda: dict(loc=torch.Size([5, 3]), concentration=torch.Size([5])),
        lambda found: found == ((5,), (3,)),
        invalid=dict(loc=shape | {"empty": ()}, concentration=shape | {"another size": (2,)}),
    ),
]
