# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.nn``, its likelihoods and priors, and ``pyro_radial.poutine``."""

import math

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.nn import MultiHead, likelihoods
from tests.calls.sweep import Part, Row, some

NAN = math.nan
X, F = torch.zeros(4, 3), torch.zeros(4, 2)
WEIGHTS = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}


def linear():
    return nn.Linear(3, 2)


def bayesian():
    return BayesianModule(linear())


def supervised():
    return SupervisedModel(bayesian(), likelihoods.Gaussian())


def multi_head():
    return MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 5)])


def guide():
    made = AutoRadial(bayesian())
    made.setup(X)
    return made


def normal_model(x=X):
    return pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))


def own_guide(x):
    pyro.sample("weight", dist.Normal(torch.zeros(1, 3), 1.0).to_event(2))


def sites_of(prior):
    return poutine.trace(BayesianModule(linear(), prior)).get_trace(X)


class UserLikelihood(likelihoods.Likelihood):
    """A likelihood as a user writes it."""

    def observation(self, f, **noise):
        return dist.Normal(f, 1.0).to_event(self.event_dim)


others_shape = {**WEIGHTS, "weight": torch.ones(3, 3)}
draws = {**WEIGHTS, "weight": torch.ones(5, 2, 3)}
parameters = {"another shape": Part("weight", others_shape), "unknown site": {**WEIGHTS, "gain": torch.zeros(2)}}
width = {"another width": F}
#: Right targets of each likelihood for the output F, and wrong ones.
TARGETS = {
    "Bernoulli": (torch.ones(4, 2), some(torch.full((4, 2), 2.0))),
    "Categorical": (torch.ones(4, dtype=torch.long), some(torch.full((4,), 2), torch.eye(2)[[0, 1, 0, 1]])),
    "Gaussian": (torch.ones(4, 2), {}),
    "HeteroscedasticGaussian": (torch.ones(4, 1), {}),
    "NegativeBinomial": (torch.ones(4, 2), some(-torch.ones(4, 2), torch.full((4, 2), 0.5))),
    "Poisson": (torch.ones(4, 2), some(-torch.ones(4, 2), torch.full((4, 2), 0.5))),
    "ZeroInflated": (torch.ones(4, 2), some(-torch.ones(4, 2), torch.full((4, 2), 0.5))),
}
MAKE = {"ZeroInflated": lambda: likelihoods.ZeroInflated(likelihoods.Poisson())}
#: What likelihoods leave to the distribution, which may name it otherwise.
ANY_OUTPUT = ("all nan",)
TAKEN = {
    "Gaussian": {"y": ("all nan",)},
    "HeteroscedasticGaussian": {"y": ("all nan", "a dimension too few"), "observed": ("a dimension too few",)},
}

ROWS = [
    Row(
        "nn.BayesianModule",
        lambda: dict(net=linear(), prior=dist.Normal(0.0, 2.0)),
        dict(
            net=some(nn.LazyLinear(2)),
            prior=some(
                *({}, dist.Normal(torch.zeros(5), 1.0)),
                {"weight": dist.Normal(0.0, 1.0), "gain": dist.Normal(0.0, 1.0)},
            ),
            select=some("(", "gain", lambda name, parameter: False),
        ),
    ),
    Row("nn.BayesianModule.at", lambda: dict(parameters=WEIGHTS, args=(X,)), dict(parameters=parameters), on=bayesian),
    Row(
        "nn.BayesianModule.one_value_each",
        lambda: dict(parameters={name: value[None] for name, value in WEIGHTS.items()}),
        dict(parameters=parameters | some(draws)),
        on=bayesian,
    ),
    Row(
        "nn.BayesianModule.to_module",
        lambda: dict(draw=WEIGHTS),
        dict(draw=some({"weight": torch.ones(2, 3)}, others_shape, draws)),
        on=bayesian,
    ),
    Row("nn.MultiHead", lambda: dict(trunk=nn.Linear(3, 4), heads=[nn.Linear(4, 2), nn.Linear(4, 5)])),
    Row(
        "nn.use_head",
        lambda: dict(model=BayesianModule(multi_head()), head=1, other_heads=[0]),
        dict(head=some(2), other_heads=some([2])),
        takes=dict(other_heads=("empty",)),
    ),
    Row(
        "nn.SupervisedModel",
        lambda: dict(bnn=bayesian(), likelihood=likelihoods.Gaussian()),
        dict(likelihood=some({}, {"a.b": likelihoods.Gaussian()})),
    ),
    Row(
        "nn.SupervisedModel.forward",
        lambda: dict(x=X, y=torch.ones(4, 2)),
        dict(x=width | {"no rows": Part("f", X[:0])}),
        takes=dict(x=("all nan",), y=("all nan",)),
        on=supervised,
    ),
    Row(
        "nn.SupervisedModel.output",
        lambda: dict(x=X, parameters=WEIGHTS),
        dict(x=width, parameters=parameters),
        takes=dict(x=("all nan", "no rows")),
        on=supervised,
    ),
    Row("nn.priors.FanIn"),
    Row("nn.priors.RadialDirectionalPrior", extra=dict(grouping=some({"weight": "rows"}, {"w": "row"})), then=sites_of),
    Row("poutine.mean_only", lambda: dict(guide=guide())),
    Row(
        "poutine.local_reparameterization",
        lambda: dict(guide=own_guide, sites=["weight"]),
        dict(sites=some(["bias"])),
        then=lambda handled: handled(X),
    ),
    Row(
        "poutine.swap_prior",
        lambda: dict(model=normal_model, priors={"w": dist.Laplace(torch.zeros(3), 0.1).to_event(1)}),
        dict(
            priors={
                "unknown site": {"v": dist.Normal(0.0, 1.0)},
                "another shape": Part("w", {"w": dist.Normal(torch.zeros(2), 1.0).to_event(1)}),
                "another support": Part("w", {"w": dist.HalfNormal(torch.ones(3)).to_event(1)}),
            }
        ),
        then=lambda handled: handled(X),
    ),
    Row("nn.likelihoods.Likelihood", lambda: dict(num_data=100, event_dim=0)),
    *(
        Row(f"nn.likelihoods.{name}", extra={"event_dim": {"zero": 0}} if "Categorical" in name else {})
        for name in ("Bernoulli", "Categorical", "NegativeBinomial", "Poisson")
    ),
    Row(
        "nn.likelihoods.Gaussian",
        extra=dict(precision_prior=some(dist.Normal(0.0, 1.0), dist.Gamma(torch.ones(2), torch.ones(2)).to_event(1))),
    ),
    Row(
        "nn.likelihoods.Gaussian",
        lambda: dict(scale=torch.ones(2)),
        dict(scale=some(-torch.ones(2), torch.ones(4, 2))),
        takes=dict(scale=("a dimension too few",)),
        then=lambda likelihood: likelihood(F, torch.ones(4, 2)),
        case="noise of each output",
    ),
    Row(
        "nn.likelihoods.ZeroInflated",
        lambda: dict(likelihood=likelihoods.Poisson(), gate=0.2),
        dict(likelihood=some(likelihoods.Gaussian(), likelihoods.Bernoulli(), None)),
    ),
    Row("nn.likelihoods.HeteroscedasticGaussian", extra=dict(event_dim={"zero": 0})),
    Row("nn.likelihoods.Likelihood.train_on", lambda: dict(num_data=100), on=lambda: UserLikelihood(num_data=100)),
    Row("nn.likelihoods.Likelihood.function_values", lambda: dict(f=F), takes={"f": ANY_OUTPUT}, on=UserLikelihood),
    *(
        Row(
            "nn.likelihoods.Likelihood.forward",
            lambda right=right: dict(f=F, y=right, observed=torch.ones(right.shape, dtype=torch.bool)),
            dict(y=wrong | {"another shape": torch.ones(3, 2)}),
            takes={"f": ANY_OUTPUT, **TAKEN.get(name, {})},
            on=MAKE.get(name, getattr(likelihoods, name)),
            case=name,
        )
        for name, (right, wrong) in TARGETS.items()
    ),
]
