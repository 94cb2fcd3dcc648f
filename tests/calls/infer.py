# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.infer``, without guides."""

import math
from functools import cache

import torch
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import Prediction, SampledNetwork, TermsELBO, last_layer_laplace
from pyro_radial.nn import likelihoods
from tests.calls.sweep import Part, Row, some

NAN = math.nan
X, Y = torch.linspace(-1.0, 1.0, 24).reshape(8, 3), torch.linspace(0.0, 1.0, 8).unsqueeze(-1)


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


ROWS = [
    Row("infer.TermsELBO"),
    Row("infer.CompiledSVI", lambda: guided() | dict(optim=adam, loss=TermsELBO(), compile=False)),
    Row("infer.CompiledELBO", lambda: dict(loss=TermsELBO(), compile=False)),
    Row("infer.FitOptions", extra=dict(autocast=some(torch.float64, torch.float16))),
    Row(
        "infer.fit",
        lambda: guided() | dict(data=(X, Y), epochs=1, batch_size=4, optim=adam, validation=(X, Y)),
        dict(loss={"without terms": Trace_ELBO()}, checkpoint=some("/", "")),
    ),
    *(
        Row(
            "infer.predict",
            lambda method=method: guided() | dict(x=X, num_samples=5, chunk_size=4, method=method),
            dict(guide=guides, dropout={"without layers": True}),
            takes=takes,
            case=case,
        )
        for case, method, guides, takes in (
            ("", "draws", some(Part("samples", {})), {"x": ("a dimension too few",)}),
            ("linearized", "linearized", some({"weight": torch.zeros(5, 1, 3)}), {}),
        )
    ),
    Row(
        "infer.SampledNetwork",
        lambda: guided() | dict(num_samples=5, chunk_size=2, x=X[:2]),
        takes={"x": ("a dimension too few",)},
    ),
    Row("infer.SampledNetwork.predict", lambda: dict(x=X), takes={"x": ("a dimension too few",)}, on=sampled),
    Row(
        "infer.LinearizedNetwork",
        lambda: dict(zip(("model", "guide"), last_layer(), strict=True)),
        dict(guide=some(guided()["guide"])),
    ),
    Row(
        "infer.Prediction.joined",
        lambda: dict(predictions=[prediction(), prediction()]),
        dict(predictions=some([], [Prediction(torch.zeros(2, 3, 1)), Prediction(torch.zeros(2, 4, 1))])),
    ),
    Row(
        "infer.Prediction.log_prob",
        lambda: dict(y=Y),
        dict(y=some(Y[:3])),
        takes=dict(y=("all nan", "a dimension too few")),
        on=prediction,
    ),
    Row("infer.Prediction.sample_targets", lambda: dict(num_targets=2), on=prediction),
    Row(
        "infer.Prediction.quantiles",
        lambda: dict(levels=[0.25, 0.75], num_targets=2),
        dict(levels=some(0.0, [0.5, 1.0], NAN)),
        on=prediction,
    ),
    Row("infer.diagnose", lambda: guided() | dict(data=(X, Y), num_particles=2)),
    Row(
        "infer.to_arviz",
        lambda: dict(zip(("model", "posterior"), guided().values(), strict=True)) | dict(args=(X, Y), num_samples=5),
        dict(posterior=some({"weight": torch.ones(2, 4)})),
    ),
    Row(
        "infer.last_layer_laplace",
        lambda: dict(zip(("model", "trained"), guided().values(), strict=True)) | dict(data=(X, Y)),
    ),
]
