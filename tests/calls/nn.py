# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.nn`` and its priors."""

import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn

from pyro_radial.nn import likelihoods
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.input_gradient import InputGradient
from pyro_radial.nn.multi_head import MultiHead
from pyro_radial.nn.supervised import SupervisedModel
from tests.calls.sweep import (
    NONE,
    Call,
    Lazy,
    Part,
    distribution,
    flag,
    fraction,
    mapping,
    module,
    optional,
    positive_float,
    tensor,
    text,
)

X = torch.zeros(4, 3)
WEIGHTS = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
INPUTS = "given to the network as they are"

weights = mapping | {
    "number for a site": {"weight": 1.0},
    "another shape": Part("weight", {"weight": torch.ones(3, 3), "bias": torch.zeros(2)}),
    "unknown site": {**WEIGHTS, "gain": torch.zeros(2)},
}
inputs = tensor | {"number": 3, "another width": torch.zeros(4, 2), "integers": torch.zeros(4, 3, dtype=torch.long)}


def linear():
    return nn.Linear(3, 2)


def bayesian():
    return BayesianModule(linear())


def supervised():
    return SupervisedModel(bayesian(), likelihoods.Gaussian())


def multi_head():
    return MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 5)])


def shaped(*expected):
    return lambda found: tuple(found.shape) == expected and bool(found.isfinite().all())


def has(*sites):
    return lambda found: found.sites == sites


def has_scale(prior, weight, bias):
    return (float(prior("w", torch.zeros(2, 4)).stddev), float(prior("b", torch.zeros(2)).stddev)) == (weight, bias)


def sites_of(prior):
    """The sites that a network has under a prior."""
    return list(poutine.trace(BayesianModule(linear(), prior)).get_trace(X).stochastic_nodes)


parameters = [("name", lambda: "weight"), ("parameter", lambda: torch.zeros(2, 3))]

CALLS = [
    Call(
        "nn.BayesianModule",
        lambda: dict(net=linear(), prior=dist.Normal(0.0, 2.0), select="weight"),
        has("weight"),
        invalid=dict(
            net=module | {"Bayesian": Lazy(bayesian), "lazy layer": nn.LazyLinear(2)},
            prior=distribution
            | {
                "another shape": dist.Normal(torch.zeros(5), 1.0),
                "missing site": {},
                "unknown site": {"weight": dist.Normal(0.0, 1.0), "gain": dist.Normal(0.0, 1.0)},
                "function of numbers": lambda name, parameter: 1.0,
                "torch's own": torch.distributions.Normal(0.0, 1.0),
            },
            select={"number": 3, "pattern": "(", "nothing": "gain", "function": lambda name, parameter: False},
        ),
        also=(({"select": None}, has("weight", "bias")),),
    ),
    Call(
        "nn.BayesianModule.forward",
        lambda: dict(args=(X,), kwargs={}),
        shaped(4, 2),
        on=bayesian,
        unchecked=dict(args=INPUTS, kwargs=INPUTS),
    ),
    Call(
        "nn.BayesianModule.at",
        lambda: dict(parameters=WEIGHTS, args=(X,), kwargs={}),
        lambda found: bool((found == 0.0).all()),
        invalid=dict(parameters=weights),
        on=bayesian,
        unchecked=dict(args=INPUTS, kwargs=INPUTS),
    ),
    Call(
        "nn.BayesianModule.one_value_each",
        lambda: dict(parameters={name: value.unsqueeze(0) for name, value in WEIGHTS.items()}),
        lambda found: {name: value.shape for name, value in found.items()} == {"weight": (2, 3), "bias": (2,)},
        invalid=dict(parameters=weights | {"draws": {"weight": torch.ones(5, 2, 3)}}),
        on=bayesian,
    ),
    Call(
        "nn.BayesianModule.to_module",
        lambda: dict(draw=WEIGHTS),
        lambda found: type(found) is nn.Linear and bool((found.weight == 1.0).all()),
        invalid=dict(
            draw=mapping
            | {
                "number for a site": {**WEIGHTS, "weight": 1.0},
                "missing site": {"weight": torch.ones(2, 3)},
                "another shape": {**WEIGHTS, "weight": torch.ones(3, 3)},
                "draws": {**WEIGHTS, "weight": torch.ones(5, 2, 3)},
            }
        ),
        on=bayesian,
    ),
    Call(
        "nn.BayesianModule.train",
        lambda: dict(mode=False),
        lambda found: not found.training,
        invalid=dict(mode=flag),
        on=bayesian,
    ),
    Call(
        "nn.InputGradient",
        lambda: dict(net=nn.Linear(3, 1), of="energy", name="force", factor=-1.0),
        lambda found: bool((found(X)["force"] == -found.net.weight).all()),
        invalid=dict(
            net=module,
            of=text,
            name=text | {"that of the output": "energy"},
            factor={**NONE, "text": "-", "infinite": float("inf"), "flag": True},
        ),
    ),
    Call(
        "nn.InputGradient.forward",
        lambda: dict(x=X, args=(), kwargs={}),
        lambda found: {name: tuple(value.shape) for name, value in found.items()} == {"E": (4, 1), "F": (4, 3)},
        on=lambda: InputGradient(nn.Linear(3, 1), "E", "F"),
        unchecked=dict(x=INPUTS, args=INPUTS, kwargs=INPUTS),
    ),
    Call(
        "nn.MultiHead",
        lambda: dict(trunk=nn.Linear(3, 4), heads=[nn.Linear(4, 2), nn.Linear(4, 5)]),
        lambda found: tuple(found(X).shape) == (4, 2),
        invalid=dict(trunk=module, heads={**NONE, "number": 2, "none": [], "numbers": [2, 5], "text": "two"}),
    ),
    Call(
        "nn.MultiHead.forward",
        lambda: dict(args=(X,), kwargs={}),
        shaped(4, 2),
        on=multi_head,
        unchecked=dict(args=INPUTS, kwargs=INPUTS),
    ),
    Call(
        "nn.use_head",
        lambda: dict(model=BayesianModule(multi_head()), head=1, also=[0]),
        lambda found: found is None,
        invalid=dict(
            model=module | {"without heads": Lazy(bayesian)},
            head={**NONE, "text": "one", "negative": -1, "too large": 2, "flag": True, "fraction": 0.5},
            also={**NONE, "number": 0, "text": "0", "too large": [2], "texts": ["0"]},
        ),
    ),
    Call(
        "nn.SupervisedModel",
        lambda: dict(bnn=bayesian(), likelihood=likelihoods.Gaussian(), local_reparameterization=True),
        lambda found: found.local_reparameterization and tuple(found(X).shape) == (4, 2),
        invalid=dict(
            bnn=module | {"plain network": nn.Linear(3, 2)},
            likelihood=module
            | {
                "class": likelihoods.Gaussian,
                "distribution": dist.Normal(0.0, 1.0),
                "no names": {},
                "name with a dot": {"a.b": likelihoods.Gaussian()},
                "network under a name": {"a": nn.Linear(3, 2)},
            },
            local_reparameterization=flag,
        ),
    ),
    Call(
        "nn.SupervisedModel.forward",
        lambda: dict(x=X, y=torch.ones(4, 2)),
        lambda found: bool((found == 1.0).all()),
        invalid=dict(
            x=inputs | {"no rows": Part("f", torch.zeros(0, 3))},
            y=optional(tensor) | {"another shape": torch.zeros(3, 2), "number": 1.0},
        ),
        also=(({"y": None}, shaped(4, 2)),),
        on=supervised,
    ),
    Call(
        "nn.SupervisedModel.output",
        lambda: dict(x=X, parameters=WEIGHTS),
        lambda found: bool((found == 0.0).all()),
        invalid=dict(x=inputs, parameters=optional(weights)),
        also=(({"parameters": None}, shaped(4, 2)),),
        on=supervised,
    ),
    Call(
        "nn.priors.FanIn",
        lambda: dict(gain=2.0, bias_scale=3.0),
        lambda found: has_scale(found, 1.0, 3.0),
        invalid=dict(gain=positive_float, bias_scale=positive_float),
    ),
    Call(
        "nn.priors.ScaleMixture",
        lambda: dict(pi=0.25, scale1=2.0, scale2=0.5),
        lambda found: abs(float(found("w", torch.zeros(3)).variance) - (0.25 * 4.0 + 0.75 * 0.25)) < 1e-6,
        invalid=dict(pi=fraction, scale1=positive_float, scale2=positive_float),
    ),
    Call(
        "nn.priors.RadialDirectionalPrior",
        lambda: dict(grouping="column", global_scale=2.0, bias_scale=3.0),
        lambda found: found[0] == "weight.global_radius_gamma" and "weight.column_direction" in found,
        then=sites_of,
        invalid=dict(
            grouping={
                **NONE,
                "number": 3,
                "unknown": "rows",
                "unknown of a site": {"weight": "rows"},
                "unknown site": {"w": "row"},
            },
            global_scale=positive_float,
            bias_scale=positive_float,
        ),
    ),
]

NOT_CALLED = {
    "nn.MultiHead.uses_parameter": "a name of a parameter of the network",
    "nn.priors.FanIn.__call__": "a name and a parameter of the network",
    "nn.priors.ScaleMixture.__call__": "a name and a parameter of the network",
    "nn.priors.RadialDirectionalPrior.setup": "the names and parameters of the network",
    "nn.priors.RadialDirectionalPrior.sample_parameter": "a name and a parameter of the network",
}
