# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.infer.autoguide`` and its families."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_radial.infer.autoguide import AutoCorrelated, AutoPerSite, AutoRadial, families, init_to_network
from pyro_radial.nn import priors
from pyro_radial.nn.bayesian_module import BayesianModule
from tests.calls.sweep import (
    NONE,
    STRANGER,
    Call,
    flag,
    fraction,
    function,
    mapping,
    module,
    non_negative_int,
    optional,
    positive_float,
    positive_int,
    tensor,
)

X = torch.zeros(4, 3)
ARGUMENTS = "given to the model as they are"


def bayesian():
    return BayesianModule(nn.Linear(3, 2), dist.Normal(0.0, 1.0))


def plates(x):
    return pyro.plate("data", len(x))


def ready(guide):
    """The guide with its parameters; most arguments are read here."""
    guide.setup(X)
    return guide


def guide():
    return ready(AutoRadial(bayesian()))


def correlated():
    return ready(AutoCorrelated(bayesian()))


def family_of(name, kind):
    return lambda guide: type(guide.chosen_families()[name]) is kind


def site():
    """A site in Pyro's trace of a model."""
    return pyro.poutine.trace(bayesian()).get_trace(X).nodes["weight"]


class Own(AutoPerSite):
    def default_family(self, name, site):
        return families.Normal()


model = function | {"class": BayesianModule}
init = optional(positive_float)
family = optional(mapping) | {
    "unknown site": {"gain": families.Normal()},
    "class": {"weight": families.Normal},
    "function of numbers": lambda name, site: 3,
    "pattern": {"(": families.Normal()},
}
shared = dict(
    model=model,
    init_loc_fn=function,
    init_stddev=init,
    families=family,
    create_plates=optional(function) | {"stranger": STRANGER},
)


def valid(**others):
    return lambda: dict(
        model=bayesian(),
        init_loc_fn=init_to_network,
        init_stddev=0.3,
        families={"bias": families.Delta()},
        create_plates=plates,
        **others,
    )


def without(kind, *names):
    """Valid calls in which these arguments are None."""
    return tuple(({name: None}, family_of("weight", kind)) for name in names)


value = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}

CALLS = [
    Call(
        "infer.autoguide.AutoPerSite",
        valid(),
        lambda guide: guide.latent_sites == () and guide.init_loc_fn is init_to_network,
        invalid={name: values for name, values in shared.items() if name != "families"}
        | {"families": optional(mapping)},
        also=tuple(
            ({name: None}, lambda guide: guide.latent_sites == ())
            for name in ("init_stddev", "families", "create_plates")
        ),
    ),
    Call(
        "infer.autoguide.AutoMeanField",
        valid(init_scale=None),
        lambda guide: bool((guide.posterior()["weight"].stddev - 0.3).abs().max() < 1e-6),
        invalid=shared | dict(init_scale=init),
        also=(
            ({"init_scale": 0.2, "init_stddev": None}, family_of("bias", families.Delta)),
            *without(families.Normal, "init_stddev", "families", "create_plates"),
        ),
        then=ready,
    ),
    Call(
        "infer.autoguide.AutoCorrelated",
        lambda: valid(sites="last layer", rank=2)() | dict(families=None),
        lambda guide: guide.correlated == ("weight", "bias") and guide.factor.shape == (8, 2),
        invalid=shared
        | dict(
            sites={**NONE, "number": 3, "another text": "first layer", "unknown": ["gain"], "empty": []},
            rank=optional(positive_int) | {"above the elements": 9},
        ),
        also=(
            ({"sites": "network"}, lambda guide: guide.correlated == ("weight", "bias")),
            ({"sites": ["bias"]}, lambda guide: guide.correlated == ("bias",)),
            ({"rank": None}, lambda guide: guide.factor.shape == (8, 8)),
            *(({name: None}, lambda guide: len(guide.correlated) == 2) for name in ("init_stddev", "create_plates")),
        ),
        then=ready,
    ),
    Call(
        "infer.autoguide.AutoCorrelated.forward",
        lambda: dict(args=(X,), kwargs={}),
        lambda found: set(found) == {"weight", "bias"},
        on=correlated,
        unchecked=dict(args=ARGUMENTS, kwargs=ARGUMENTS),
    ),
    Call(
        "infer.autoguide.AutoCorrelated.set_factor",
        lambda: dict(factor=torch.eye(8)),
        lambda found: found is None,
        invalid=dict(
            factor=tensor
            | {"shape": torch.eye(7), "NaN": math.nan * torch.eye(8), "zero": torch.zeros(8, 8), "number": 1.0}
        ),
        on=correlated,
    ),
    Call(
        "infer.autoguide.AutoRadial",
        valid(init_scale=None, event_dim={"weight": 1}),
        lambda guide: guide.posterior()["weight"].base_dist.event_shape == (3,),
        invalid=shared
        | dict(
            init_scale=init,
            event_dim={
                "text": "two",
                "negative": -1,
                "fraction": 0.5,
                "flag": True,
                "above the event": 3,
                "unknown site": {"gain": 1},
                "text of a site": {"weight": "one"},
                "above the site": {"bias": 2},
            },
        ),
        also=(
            ({"init_scale": 0.2, "init_stddev": None}, family_of("bias", families.Delta)),
            *without(families.Radial, "init_stddev", "families", "create_plates", "event_dim"),
        ),
        then=ready,
    ),
    Call(
        "infer.autoguide.AutoRadialDirectional",
        lambda: (
            valid(init_mean_cosine=0.5, shared_concentration=False)()
            | dict(model=BayesianModule(nn.Linear(3, 2), priors.RadialDirectionalPrior()))
        ),
        lambda guide: guide.posterior()["weight.direction"].batch_shape == (),
        invalid=shared
        | dict(
            init_mean_cosine=fraction,
            shared_concentration=flag,
            families=family | {"unknown site": {"gain": families.Normal()}, "class": {"bias": families.Normal}},
        ),
        also=(
            ({"init_stddev": None}, family_of("bias", families.Delta)),
            ({"families": None}, family_of("bias", families.Normal)),
            ({"create_plates": None}, family_of("bias", families.Delta)),
        ),
        then=ready,
    ),
    *(
        Call(
            f"infer.autoguide.AutoPerSite.{method}",
            lambda: dict(args=(X,), kwargs={}),
            check,
            on=lambda: Own(bayesian()),
            unchecked=dict(args=ARGUMENTS, kwargs=ARGUMENTS),
        )
        for method, check in (
            ("setup", lambda found: found is None),
            ("forward", lambda found: set(found) == {"weight", "bias"}),
            ("median", lambda found: set(found) == {"weight", "bias"}),
        )
    ),
    Call(
        "infer.autoguide.AutoPerSite.quantiles",
        lambda: dict(quantiles=[0.25, 0.5], args=(), sites=["bias"], kwargs={}),
        lambda found: list(found) == ["bias"] and tuple(found["bias"].shape) == (2, 2),
        invalid=dict(
            quantiles={**NONE, "text": "half", "number": 0.5, "zero": [0.0], "one": [1.0], "texts": ["half"]},
            sites={"number": 3, "unknown": ["gain"], "unknown text": "gain"},
        ),
        also=(({"sites": None}, lambda found: set(found) == {"weight", "bias"}),),
        on=guide,
        unchecked=dict(args=ARGUMENTS, kwargs=ARGUMENTS),
    ),
    Call(
        "infer.autoguide.AutoPerSite.start_at",
        lambda: dict(distributions={"bias": dist.Normal(torch.ones(2), 0.5).to_event(1)}, scales=True),
        lambda found: found is None,
        invalid=dict(
            distributions=mapping
            | {
                "number for a site": {"bias": 1.0},
            },
            scales=flag,
        ),
        on=lambda: Own(bayesian()),
    ),
    Call(
        "infer.autoguide.AutoPerSite.load_means",
        lambda: dict(state_dict={"weight": torch.ones(2, 3)}, strict=False),
        lambda missing: missing.missing_sites == ["bias"],
        invalid=dict(
            state_dict=mapping
            | {
                "number for a site": {"weight": 1.0},
                "another shape": {"weight": torch.ones(3, 3)},
                "nan": {"weight": torch.full((2, 3), math.nan)},
            },
            strict=flag,
        ),
        on=guide,
    ),
    Call(
        "infer.autoguide.AutoPerSite.set_stddevs",
        lambda: dict(stddevs={"weight": torch.tensor(0.5)}),
        lambda found: found is None,
        invalid=dict(
            stddevs=mapping
            | {
                "number for a site": {"weight": 1.0},
                "another shape": {"weight": torch.ones(5)},
                "zero": {"weight": torch.zeros(2, 3)},
                "nan": {"weight": torch.full((2, 3), math.nan)},
                "unknown site": {"gain": torch.ones(2, 3)},
            }
        ),
        on=guide,
    ),
    Call(
        "infer.autoguide.AutoPerSite.load_state_dict",
        lambda: dict(state_dict=guide().state_dict(), strict=True, assign=False),
        lambda found: not found.missing_keys and not found.unexpected_keys,
        invalid=dict(state_dict=mapping | {"another's": {}}, strict=flag, assign=flag),
        on=guide,
        errors=(TypeError, ValueError, RuntimeError),
    ),
    Call(
        "infer.autoguide.init_to_network",
        lambda: dict(site=site(), net=nn.Linear(3, 2), fallback=init_to_network),
        lambda found: tuple(found.shape) == (2, 3),
        invalid=dict(
            site={"number": 3, "text": "weight", "stranger": STRANGER},
            net=optional(module) | {"another shape": nn.Linear(2, 2)},
            fallback=function,
        ),
        also=(
            ({"site": None}, lambda found: isinstance(found, partial)),
            ({"net": None}, lambda found: tuple(found.shape) == (2, 3)),
        ),
    ),
    Call(
        "infer.autoguide.families.LocScale",
        lambda: dict(init_stddev=0.5),
        lambda found: found.init_stddev == 0.5,
        invalid=dict(init_stddev=init),
        also=(({"init_stddev": None}, lambda found: found.init_stddev is None),),
    ),
    Call(
        "infer.autoguide.families.Normal",
        lambda: dict(init_stddev=0.5),
        lambda found: found.init_stddev == 0.5,
        invalid=dict(init_stddev=init),
        also=(({"init_stddev": None}, lambda found: found.init_stddev is None),),
    ),
    Call(
        "infer.autoguide.families.Radial",
        lambda: dict(init_stddev=None, init_scale=0.5, event_dim=1),
        lambda found: (found.init_scale, found.event_dim) == (0.5, 1),
        invalid=dict(init_stddev=init, init_scale=init, event_dim=optional(non_negative_int)),
        also=(
            ({"init_scale": None}, lambda found: found.init_scale is None),
            ({"event_dim": None}, lambda found: found.event_dim is None),
        ),
    ),
    *(
        Call(
            f"infer.autoguide.families.{name}",
            lambda: dict(init_mean_cosine=0.5, shared_concentration=False),
            lambda found: (found.init_mean_cosine, found.shared_concentration) == (0.5, False),
            invalid=dict(init_mean_cosine=fraction, shared_concentration=flag),
        )
        for name in ("Directional", "VonMisesFisher")
    ),
]

FAMILY_METHODS = {
    "Family": "transform initial initial_at distribution guide_distribution on_support local_noise center quantiles "
    "spread",
    "LocScale": "scale_of initial_scale initial initial_at",
    "Normal": "distribution quantiles",
    "Delta": "initial initial_at distribution on_support local_noise quantiles",
    "Radial": "radius_dim elements_per_radius scale_of initial_scale distribution guide_distribution quantiles",
    "Directional": "concentration_at transform initial initial_at distribution center spread",
    "VonMisesFisher": "concentration_at",
}
NOT_CALLED = {
    **{
        f"infer.autoguide.families.{name}.{method}": "a guide gives it a site and the site's parameters"
        for name, methods in FAMILY_METHODS.items()
        for method in methods.split()
    },
    "infer.autoguide.families.family.Site.of": "a guide makes it from a trace of the model",
    "infer.autoguide.AutoPerSite.scales_start_at_distribution": "training asks for each site of the guide",
    **{
        f"infer.autoguide.{name}.default_family": "a guide gives it a site of its trace of the model"
        for name in ("AutoPerSite", "AutoCorrelated", "AutoMeanField", "AutoRadial", "AutoRadialDirectional")
    },
}
