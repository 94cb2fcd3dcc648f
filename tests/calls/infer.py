# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.infer``, without ensembles."""

import math
from functools import cache, partial

import pyro
import torch
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_radial.infer import CompiledSVI, FitOptions, NaturalGradient, RadialELBO, SampledNetwork, predict
from pyro_radial.infer.autoguide import AutoRadial
from pyro_radial.nn import likelihoods
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.supervised import SupervisedModel
from tests.calls.sweep import (
    NONE,
    STRANGER,
    Call,
    Lazy,
    Part,
    flag,
    function,
    name_of_one,
    non_negative_float,
    non_negative_int,
    optional,
    positive_float,
    positive_int,
    tensor,
)

X, Y = torch.linspace(-1.0, 1.0, 24).reshape(8, 3), torch.linspace(0.0, 1.0, 8).unsqueeze(-1)
ARGUMENTS = "given to the model and the guide as they are"


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


def shaped(*expected):
    return lambda found: tuple(found.shape) == expected and bool(found.isfinite().all())


def finite(found):
    return math.isfinite(float(found))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


models = function | {"class": SupervisedModel}
guides = function | {"class": AutoRadial}
inputs = tensor | {"nan": torch.full((8, 3), math.nan), "no rows": torch.zeros(0, 3)}
rows = {
    **NONE,
    "text": "rows",
    "number": 3,
    "inputs alone": (X,),
    "ragged": (X, Y[:3]),
    "nan": (X, Y * math.nan),
    "no rows": (X[:0], Y[:0]),
    "stranger": STRANGER,
}
optims = {
    "text": "adam",
    "number": 0.1,
    "class": pyro.optim.PyroOptim,
    "optimizer": Lazy(lambda: adam(nn.Linear(2, 1).parameters())),
}
losses = {"text": "elbo", "number": 3, "class": RadialELBO, "without terms": Trace_ELBO()}
seeds = non_negative_int | {"too large": 2**70}


def fit_arguments():
    return guided() | dict(
        data=(X, Y),
        epochs=1,
        batch_size=4,
        optim=adam,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        loss=RadialELBO(),
        validation=(X, Y),
        seed=1,
        checkpoint=None,
        callback=lambda record: True,
        progress=False,
        options=FitOptions(),
    )


def one_epoch(result):
    return len(result.history) == 1 and math.isfinite(result.history[0]["loss"])


CALLS = [
    Call(
        "infer.RadialELBO",
        lambda: dict(num_particles=2, kl_weight=0.5, strict_kl=True, kwargs={"vectorize_particles": True}),
        lambda loss: (loss.num_particles, loss.weight_now(), loss.strict_kl) == (2, 0.5, True),
        invalid=dict(num_particles=positive_int, kl_weight=non_negative_float, strict_kl=flag),
        unchecked=dict(kwargs="given to Pyro's own class as they are"),
    ),
    *(
        Call(
            f"infer.RadialELBO.{method}",
            lambda: guided() | dict(args=(X, Y), kwargs={}),
            finite,
            invalid=dict(model=models, guide=guides),
            on=RadialELBO,
            unchecked=dict(args=ARGUMENTS, kwargs=ARGUMENTS),
            then=lambda found: found.detach() if isinstance(found, torch.Tensor) else found,
        )
        for method in ("loss", "differentiable_loss", "loss_and_grads")
    ),
    Call(
        "infer.CompiledSVI",
        lambda: (
            guided()
            | dict(
                optim=pyro.optim.Adam({"lr": 0.01}),
                loss=RadialELBO(),
                loss_and_grads=None,
                compile=False,
                max_signatures=2,
                check_every=1,
                options={"max_autotune": False},
            )
        ),
        finite,
        invalid=dict(
            model=models,
            guide=guides,
            optim=NONE | {name: value for name, value in optims.items() if name != "optimizer"},
            loss=NONE | {name: value for name, value in losses.items() if name != "without terms"},
            loss_and_grads={"text": "fast", "number": 3, "stranger": STRANGER},
            compile=flag,
            max_signatures=positive_int,
            check_every=optional(positive_int),
            options={"text": "fast", "number": 3, "stranger": STRANGER},
        ),
        also=(({"check_every": None}, finite), ({"options": None}, finite), ({"optim": adam}, finite)),
        then=lambda svi: svi.step(X, Y),
    ),
    *(
        Call(
            f"infer.CompiledSVI.{method}",
            lambda: dict(args=(X, Y), kwargs={}),
            finite,
            on=lambda: CompiledSVI(**guided(), optim=adam, loss=RadialELBO(), compile=False),
            unchecked=dict(args=ARGUMENTS, kwargs=ARGUMENTS),
        )
        for method in ("step", "evaluate_loss")
    ),
    Call(
        "infer.CompiledSVI.loss_and_grads",
        lambda: dict(**guided(), args=(X, Y), kwargs={}),
        finite,
        on=lambda: CompiledSVI(**guided(), optim=adam, loss=RadialELBO(), compile=False),
        unchecked=dict(model=ARGUMENTS, guide=ARGUMENTS, args=ARGUMENTS, kwargs=ARGUMENTS),
    ),
    Call(
        "infer.FitOptions",
        lambda: dict(
            num_data=100,
            patience=2,
            mean_only_epochs=1,
            accumulate=2,
            clip_norm=1.0,
            autocast=torch.bfloat16,
            compile=True,
            scheduler_interval="step",
            checkpoint_every=5,
        ),
        lambda found: (found.num_data, found.accumulate, found.scheduler_interval) == (100, 2, "step"),
        invalid=dict(
            num_data=optional(positive_int),
            patience=optional(positive_int),
            mean_only_epochs=non_negative_int,
            accumulate=positive_int,
            clip_norm=optional(positive_float),
            autocast={"text": "bfloat16", "number": 16, "float64": torch.float64, "integers": torch.int8},
            compile=flag,
            scheduler_interval=name_of_one,
            checkpoint_every=optional(positive_int),
        ),
        also=tuple(
            ({name: None}, lambda found: found.accumulate == 2)
            for name in ("num_data", "patience", "clip_norm", "autocast", "checkpoint_every")
        ),
    ),
    Call(
        "infer.NaturalGradient",
        lambda: dict(lr=0.1, hess_init=0.5, beta1=0.9, beta2=0.99, others=adam),
        lambda found: (found.lr, found.beta2) == (0.1, 0.99),
        invalid=dict(
            lr=optional(positive_float),
            hess_init=optional(positive_float),
            beta1=NONE | {"text": "half", "one": 1.0, "negative": -0.1, "nan": math.nan},
            beta2={"text": "half", "one": 1.0, "negative": -0.1, "nan": math.nan},
            others=NONE | optims | {"natural gradient": NaturalGradient()},
        ),
        also=(
            ({"hess_init": None}, lambda found: found.hess_init is None),
            ({"lr": None}, lambda found: found.lr == 0.1),
            ({"lr": None, "beta2": None}, lambda found: found.lr == 1.0),
        ),
    ),
    Call(
        "infer.NaturalGradient.optimizer",
        lambda: guided() | dict(args=(X, Y), kwargs={}),
        lambda found: isinstance(found, torch.optim.Optimizer),
        invalid=dict(model=models, guide=guides),
        on=NaturalGradient,
        unchecked=dict(args=ARGUMENTS, kwargs=ARGUMENTS),
    ),
    Call(
        "infer.fit",
        fit_arguments,
        one_epoch,
        invalid=dict(
            model=models | {"plain network": nn.Linear(3, 1)},
            guide=guides | {"function": lambda x, y: None},
            data=rows,
            epochs=positive_int,
            batch_size=optional(positive_int),
            optim=NONE | optims,
            scheduler={"text": "step", "number": 3, "stranger": STRANGER, "optimizer": pyro.optim.Adam({"lr": 0.1})},
            loss=losses,
            validation={name: value for name, value in rows.items() if name != "None"},
            seed=optional(seeds),
            checkpoint={"number": 3, "folder": "/", "empty": "", "stranger": STRANGER},
            callback=optional(function) | {"stranger": STRANGER},
            progress=flag,
            options=NONE | {"mapping": {}, "class": FitOptions, "number": 3},
        ),
        also=tuple(
            ({name: None}, one_epoch) for name in ("batch_size", "scheduler", "loss", "validation", "seed", "callback")
        ),
    ),
    Call(
        "infer.predict",
        lambda: (
            guided()
            | dict(x=X, num_samples=5, chunk_size=4, method="draws", dropout=False, function_site="f", progress=False)
        ),
        lambda found: tuple(found.samples.shape) == (5, 8, 1),
        invalid=dict(
            model=models,
            guide=guides | {"no samples": Part("samples", {}), "number for a site": Part("samples", {"weight": 1.0})},
            x=inputs,
            num_samples=optional(positive_int),
            chunk_size=positive_int,
            method=name_of_one | {"class": AutoRadial},
            dropout=flag | {"without layers": True},
            function_site=name_of_one,
            progress=flag,
        ),
        also=(({"num_samples": None}, lambda found: tuple(found.samples.shape) == (64, 8, 1)),),
    ),
    Call(
        "infer.predict",
        lambda: (
            guided()
            | dict(x=X, num_samples=5, chunk_size=4, method="linearized", dropout=False)
            | dict(function_site="f", progress=False)
        ),
        lambda found: tuple(found.samples.shape) == (5, 8, 1),
        invalid=dict(
            model=models,
            guide=guides | {"samples": {"weight": torch.zeros(5, 1, 3)}, "function": lambda *args: None},
            x=inputs | {"two": (X, X)},
            num_samples=optional(positive_int),
            chunk_size=positive_int,
            dropout=flag | {"on": True},
            function_site=name_of_one,
            progress=flag,
        ),
        unchecked=dict(method="it is what this row is about"),
        also=(({"num_samples": None}, lambda found: tuple(found.samples.shape) == (64, 8, 1)),),
        case="linearized",
    ),
    Call(
        "infer.SampledNetwork",
        lambda: guided() | dict(num_samples=5, chunk_size=2, x=X[:2]),
        lambda found: tuple(found(X).shape) == (5, 8, 1),
        invalid=dict(
            model=models | {"plain network": nn.Linear(3, 1)},
            guide=guides,
            num_samples=positive_int,
            chunk_size=positive_int,
            x=optional(inputs),
        ),
        also=(({"x": None}, lambda found: tuple(found(X).shape) == (5, 8, 1)),),
    ),
    Call(
        "infer.SampledNetwork.forward",
        lambda: dict(args=(X,), kwargs={}),
        shaped(5, 8, 1),
        on=sampled,
        unchecked=dict(args="given to the network as they are", kwargs="given to the network as they are"),
    ),
    Call(
        "infer.SampledNetwork.predict",
        lambda: dict(x=X, chunk_size=4),
        lambda found: tuple(found.samples.shape) == (5, 8, 1),
        invalid=dict(x=inputs, chunk_size=positive_int),
        on=sampled,
    ),
    Call(
        "infer.Prediction",
        lambda: dict(
            samples=torch.zeros(3, 2, 1), likelihood=likelihoods.Gaussian(), noise={"scale": torch.ones(3, 1)}
        ),
        lambda found: found.mean.shape == (2, 1),
        unchecked=dict.fromkeys(
            ("samples", "likelihood", "noise"), "predict makes it; its methods check their arguments"
        ),
    ),
    Call(
        "infer.Prediction.log_prob",
        lambda: dict(y=Y),
        shaped(8),
        invalid=dict(y=tensor | {"another shape": Y[:3], "complex": Y.to(torch.cfloat)}),
        on=prediction,
    ),
    Call(
        "infer.Prediction.sample_targets",
        lambda: dict(num_targets=2),
        shaped(10, 8, 1),
        invalid=dict(num_targets=positive_int),
        on=prediction,
    ),
    Call(
        "infer.Prediction.quantiles",
        lambda: dict(levels=[0.25, 0.75], num_targets=2),
        lambda found: tuple(found.shape) == (2, 8, 1) and bool((found[0] <= found[1]).all()),
        invalid=dict(
            levels=NONE
            | {"text": "half", "zero": 0.0, "one": [0.5, 1.0], "nan": math.nan, "none": [], "stranger": STRANGER},
            num_targets=positive_int,
        ),
        on=prediction,
    ),
    Call(
        "infer.diagnose",
        lambda: (
            guided()
            | dict(
                data=(X, Y),
                num_particles=2,
                kl_weight=0.5,
                function_site="f",
                loss=None,
                new_inputs=None,
                batch_size=None,
            )
        ),
        lambda found: found.num_rows == 8 and found.unmoved_scales == ["weight", "bias"],
        invalid=dict(
            model=models,
            guide=guides,
            data=rows,
            num_particles=positive_int,
            kl_weight=non_negative_float,
            function_site=name_of_one,
            loss={name: value for name, value in losses.items() if name != "without terms"}
            | {"of weights": RadialELBO()},
            new_inputs=optional(inputs),
            batch_size=optional(positive_int),
        ),
    ),
    Call(
        "infer.calibrate_scales",
        lambda: (
            guided()
            | dict(
                validation=(X, Y),
                scales=lambda name, mean: 1.0,
                low=0.01,
                high=1.0,
                num_samples=2,
                chunk_size=8,
                seed=1,
                progress=False,
            )
        ),
        lambda found: len(found.tried) == 22 and found.nll == min(found.tried.values()),
        invalid=dict(
            model=models,
            guide=guides | {"not of the library": lambda x, y: None},
            validation=rows,
            scales={"text": "he", "number": 1.0, "negative": lambda name, mean: -1.0, "texts": lambda name, mean: "he"},
            low=positive_float | {"above high": 2.0},
            high=positive_float | {"below low": 0.001},
            num_samples=positive_int,
            chunk_size=positive_int,
            seed=seeds,
            progress=flag,
        ),
        also=(({"scales": None}, lambda found: len(found.tried) == 22),),
    ),
    Call(
        "infer.last_layer_laplace",
        lambda: dict(
            model=(made := guided())["model"],
            trained=made["guide"],
            data=(X, Y),
            prior_precision=2.0,
            structure="full",
            chunk_size=4,
        ),
        lambda found: found.prior_precision == 2.0 and math.isfinite(found.log_evidence),
        invalid=dict(
            model=models | {"plain network": nn.Linear(3, 1)},
            trained=guides,
            data=rows,
            prior_precision=positive_float,
            structure={"number": 3, "unknown": "no_such_name", "both": ("full", "kronecker")},
            chunk_size=positive_int,
        ),
        also=(
            ({"prior_precision": "evidence"}, lambda found: found.prior_precision > 0.0),
            ({"structure": None}, lambda found: math.isfinite(found.log_evidence)),
        ),
    ),
]

NOT_CALLED = {
    "infer.RadialELBO.weighted_by": "a compiled step gives it a weight",
    "infer.NaturalGradient.advice_before": "fit gives it the number of steps",
    "infer.NaturalGradient.advice_after": "fit gives it the optimizer",
    "infer.NaturalGradient.scheduler": "fit gives it the optimizer and the number of steps",
    "infer.RadialELBO.keep": "a compiled step gives it the terms of its graph",
    "infer.HalfCauchyReparam.apply": "poutine.reparam gives it a site",
}
