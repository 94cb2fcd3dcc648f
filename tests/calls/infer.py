# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.infer``, without guides."""

import math
from functools import cache, partial

import pyro
import torch
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import (
    CompiledELBO,
    CompiledSVI,
    FitOptions,
    LinearizedNetwork,
    NaturalGradient,
    Prediction,
    SampledNetwork,
    TermsELBO,
    last_layer_laplace,
)
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Lazy, Part, Row, some

NAN = math.nan
X, Y = torch.linspace(-1.0, 1.0, 24).reshape(8, 3), torch.linspace(0.0, 1.0, 8).unsqueeze(-1)
SETTINGS = dict(epochs=1, batch_size=6, optim=partial(torch.optim.Adam, lr=0.1))


def model():
    return SupervisedModel(BayesianModule(nn.Linear(3, 1)), likelihoods.Gaussian(num_data=8, scale=0.5))


def guided():
    """A model and its guide with parameters."""
    made = model()
    guide = AutoRadial(made)
    guide.setup(X, Y)
    return {"model": made, "guide": guide}


@cache
def prediction():
    return predict(**guided(), x=X, num_samples=5)


@cache
def sampled():
    return SampledNetwork(**guided(), num_samples=5)


def last_layer():
    made = model()
    return made, last_layer_laplace(made, nn.Linear(3, 1), (X, Y))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def compiled():
    return CompiledSVI(**guided(), optim=adam, loss=TermsELBO(), compile=False)


def compiled_elbo():
    return CompiledELBO(TermsELBO(), compile=False)


models, guides = some(SupervisedModel), some(AutoRadial)
losses = some(TermsELBO)
made_optimizer = Lazy(lambda: adam(nn.Linear(2, 1).parameters()))
#: Inputs of another type are left to the network.
any_inputs = {"x": ("whole numbers", "a dimension too few")}

ROWS = [
    Row("infer.TermsELBO"),
    *(
        Row(
            f"infer.TermsELBO.{method}",
            lambda: guided() | dict(args=(X, Y)),
            dict(model=models, guide=guides),
            on=TermsELBO,
        )
        for method in ("loss", "differentiable_loss", "loss_and_grads")
    ),
    Row(
        "infer.CompiledSVI",
        lambda: guided() | dict(optim=adam, loss=TermsELBO(), compile=False),
        dict(model=models, guide=guides, optim=some(pyro.optim.PyroOptim), loss=losses),
        then=lambda svi: svi.step(X, Y),
    ),
    *(
        Row(f"infer.CompiledSVI.{method}", lambda: dict(args=(X, Y)), on=compiled)
        for method in ("step", "evaluate_loss")
    ),
    Row(
        "infer.CompiledSVI.loss_and_grads",
        lambda: guided() | dict(args=(X, Y)),
        unread=("model", "guide"),
        on=compiled,
    ),
    Row(
        "infer.CompiledELBO",
        lambda: dict(loss=TermsELBO(), compile=False),
        dict(loss=losses),
        then=lambda elbo: elbo.loss(*guided().values(), X, Y),
    ),
    *(
        Row(
            f"infer.CompiledELBO.{method}",
            lambda: guided() | dict(args=(X, Y)),
            unread=("model", "guide"),
            on=compiled_elbo,
        )
        for method in ("loss", "loss_and_grads", "differentiable_loss")
    ),
    Row("infer.CompiledELBO.__call__", guided, unread=("model", "guide"), on=compiled_elbo),
    Row("infer.FitOptions", extra=dict(autocast=some(torch.float64, torch.int8))),
    Row("infer.NaturalGradient", extra=dict(others=some(pyro.optim.PyroOptim, NaturalGradient(), made_optimizer))),
    Row(
        "infer.NaturalGradient.optimizer",
        lambda: guided() | dict(args=(X, Y)),
        dict(model=models, guide=guides),
        on=NaturalGradient,
    ),
    Row(
        "infer.fit",
        lambda: guided() | dict(data=(X, Y), epochs=1, batch_size=4, optim=adam, validation=(X, Y)),
        dict(
            model=models | some(nn.Linear(3, 1)),
            guide=guides | {"function": lambda x, y: None},
            optim=some(pyro.optim.PyroOptim, made_optimizer),
            scheduler=some(pyro.optim.Adam({"lr": 0.1})),
            loss=losses | {"without terms": Trace_ELBO()},
            checkpoint=some("/", ""),
            options=some({}, FitOptions),
        ),
    ),
    *(
        Row(
            "infer.predict",
            lambda method=method: guided() | dict(x=X, num_samples=5, chunk_size=4, method=method),
            dict(
                model=models,
                guide=guides | given,
                method=some(AutoRadial),
                dropout={"without layers": True},
                x=some((X, X)) if method == "linearized" else {},
            ),
            takes=taken,
            case=case,
        )
        for case, method, given, taken in (
            ("", "draws", some(Part("samples", {}), Part("samples", {"weight": 1.0})), {"x": ("a dimension too few",)}),
            ("linearized", "linearized", some({"weight": torch.zeros(5, 1, 3)}, lambda *args: None), {}),
        )
    ),
    Row(
        "infer.SampledNetwork",
        lambda: guided() | dict(num_samples=5, chunk_size=2, x=X[:2]),
        dict(model=models | some(nn.Linear(3, 1)), guide=guides),
        takes=any_inputs,
    ),
    Row("infer.SampledNetwork.forward", lambda: dict(args=(X,)), on=sampled),
    Row("infer.SampledNetwork.predict", lambda: dict(x=X), takes=any_inputs, on=sampled),
    Row(
        "infer.LinearizedNetwork",
        lambda: dict(zip(("model", "guide"), last_layer(), strict=True)),
        dict(model=models | some(nn.Linear(3, 1)), guide=guides | some(guided()["guide"])),
    ),
    Row(
        "infer.LinearizedNetwork.forward",
        lambda: dict(args=(X,)),
        on=lambda: LinearizedNetwork(*last_layer()),
    ),
    Row(
        "infer.Prediction.joined",
        lambda: dict(predictions=[prediction(), prediction()]),
        dict(predictions=some([], [Prediction(torch.zeros(2, 3, 1)), Prediction(torch.zeros(2, 4, 1))], prediction())),
    ),
    Row(
        "infer.Prediction.log_prob",
        lambda: dict(y=Y),
        dict(y=some(Y[:3], Y.to(torch.cfloat))),
        takes=dict(y=("all nan", "nested lists", "array", "a dimension too few")),
        on=prediction,
    ),
    Row(
        "infer.Prediction.sample_targets",
        lambda: dict(num_targets=2),
        on=prediction,
    ),
    Row(
        "infer.Prediction.quantiles",
        lambda: dict(levels=[0.25, 0.75], num_targets=2),
        dict(levels=some(0.0, [0.5, 1.0], NAN)),
        on=prediction,
    ),
    Row(
        "infer.diagnose",
        lambda: guided() | dict(data=(X, Y), num_particles=2),
        dict(model=models, guide=guides),
    ),
    Row(
        "infer.to_arviz",
        lambda: dict(zip(("model", "posterior"), guided().values(), strict=True)) | dict(args=(X, Y), num_samples=5),
        dict(posterior=guides | some({"weight": torch.ones(2, 4)}), model=models),
        unread=("kwargs",),
    ),
    Row(
        "infer.last_layer_laplace",
        lambda: dict(zip(("model", "trained"), guided().values(), strict=True)) | dict(data=(X, Y)),
        dict(model=models | some(nn.Linear(3, 1)), trained=guides, structure=some(("full", "kronecker"))),
        takes=dict(trained=("tensor",)),
    ),
]
#: fit, compiled steps and poutine.reparam call these.
NOT_CALLED = {
    "infer.Prediction",
    "infer.TermsELBO.loss_and_terms",
    "infer.TermsELBO.weight_at",
    "infer.TermsELBO.keep",
    "infer.NaturalGradient.advice_before",
    "infer.NaturalGradient.advice_after",
    "infer.NaturalGradient.scheduler",
    "infer.HalfCauchyReparam.apply",
}
