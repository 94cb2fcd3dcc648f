# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.uncertainty`` and its plots."""

import math

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import TemperatureScaling, quantile_calibration, referral_curve, reliability
from tests.calls.sweep import Row, some

NAN, INF = math.nan, math.inf
X, Y = torch.tensor([[0.1, 0.2], [0.3, -0.4], [-0.5, 0.6]]), torch.tensor([[0.1], [0.2], [-0.3]])
PROBS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.7, 0.3]])
LABELS = torch.tensor([0, 1, 0, 1])
LOGITS = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 4.0]])
ONES = torch.ones(4)

targets = some(torch.rand(3), torch.rand(2, 2, 2))
logits = some(LOGITS + INF)
results = some({})


def hits(predictions, labels):
    return (predictions.argmax(-1) == labels).double().mean()


def quantiles():
    return torch.tensor([0.2, 0.8])[:, None].expand(2, 4)


def regression():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(scale=0.5))
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return {"model": model, "guide": guide}


def gaussian(number=4):
    return Prediction(torch.zeros(8, number, 1), likelihoods.Gaussian(), {"scale": torch.ones(8, 1)})


def curve():
    return referral_curve(hits, PROBS, LABELS, torch.tensor([0.1, 0.2, 0.4, 0.3]), [0.0, 0.25])


ROWS = [
    *(
        Row(f"uncertainty.{name}", lambda: dict(probs=PROBS, labels=LABELS), dict(probs=some(PROBS[:3])))
        for name in ("reliability", "expected_calibration_error")
    ),
    Row(
        "uncertainty.reliability",
        lambda: dict(probs=PROBS, labels=LABELS, of_class=0, equal_counts=True),
        dict(of_class={"one too many": PROBS.shape[-1]}),
        case="class",
    ),
    Row(
        "uncertainty.auroc",
        lambda: dict(scores_negative=torch.tensor([0.1, 0.2]), scores_positive=torch.tensor([0.3])),
        dict(scores_negative=some(torch.rand(2, 2)), scores_positive=some(torch.rand(2, 2))),
    ),
    Row(
        "uncertainty.crps_from_draws",
        lambda: dict(draws=torch.tensor([[0.0], [2.0], [1.0]]).expand(3, 4), targets=ONES),
        dict(draws=some(torch.rand(4), torch.rand(1, 4)), targets=targets),
    ),
    Row(
        "uncertainty.interval_coverage",
        lambda: dict(lower=torch.zeros(4), upper=ONES, targets=torch.tensor([-0.5, 0.2, 0.7, 0.9])),
        dict(lower=some(2 * ONES), targets=targets),
    ),
    Row(
        "uncertainty.quantile_calibration",
        lambda: dict(quantiles=quantiles(), levels=[0.2, 0.8], targets=torch.tensor([0.1, 0.5, 0.7, 0.9])),
        dict(quantiles=some(torch.rand(3, 4)), levels=some([0.8, 0.2], [0.0, 1.0], [NAN, 0.5]), targets=targets),
    ),
    Row(
        "uncertainty.referral_curve",
        lambda: dict(score=hits, predictions=PROBS, targets=LABELS, uncertainty=torch.tensor([0.1, 0.2, 0.4, 0.3])),
        dict(
            score=some(lambda p, t: NAN),
            predictions=some(PROBS[:3]),
            uncertainty=some(torch.rand(2, 2)),
            shares=some([0.2, 0.1], [1.0], [-0.1], [NAN]),
        ),
        # The score decides what it takes.
        takes=dict(predictions=("all nan", "a dimension too few")),
    ),
    Row("uncertainty.TemperatureScaling", lambda: dict(temperature=2.0)),
    Row(
        "uncertainty.TemperatureScaling.__call__",
        lambda: dict(logits=LOGITS),
        dict(logits=logits),
        on=lambda: TemperatureScaling(2.0),
    ),
    Row(
        "uncertainty.TemperatureScaling.fit",
        lambda: dict(logits=LOGITS, labels=torch.tensor([0, 0, 1, 0])),
        dict(logits=logits),
    ),
    Row(
        "uncertainty.evaluate",
        lambda: regression() | dict(test=(X, Y), ood=10 * X, num_samples=4, method="linearized"),
        dict(test={"nan targets": (X, Y * NAN)}),
        takes=dict(ood=("a dimension too few",)),
    ),
    Row(
        "uncertainty.plots.plot_reliability",
        lambda: dict(reliabilities={"a": reliability(PROBS, LABELS)}),
        dict(reliabilities=results),
    ),
    Row(
        "uncertainty.plots.plot_quantile_calibration",
        lambda: dict(curves={"a": quantile_calibration(quantiles(), [0.2, 0.8], torch.rand(4))}),
        dict(curves=results),
    ),
]
