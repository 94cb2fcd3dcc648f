# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.uncertainty`` and its plots."""

import math

import numpy as np
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import (
    ConformalIntervals,
    ConformalSets,
    TemperatureScaling,
    quantile_calibration,
    referral_curve,
    reliability,
)
from pyro_radial.uncertainty.metrics import accuracy
from tests.calls.sweep import (
    Call,
    flag,
    mapping,
    name_of_one,
    optional,
    positive_float,
    positive_int,
    some,
    tensor,
    text,
)

NAN, INF = math.nan, math.inf
X, Y = torch.tensor([[0.1, 0.2], [0.3, -0.4], [-0.5, 0.6]]), torch.tensor([[0.1], [0.2], [-0.3]])
PROBS = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.7, 0.3]])
LABELS = torch.tensor([0, 1, 0, 1])
LOGITS = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [0.0, 4.0]])
SEEDS = some(None, "x", -1, 1.5, True, 2**70)

probabilities = tensor | some(
    *(0.5, PROBS.tolist(), PROBS.numpy(), PROBS.long(), PROBS[:, 0], PROBS[:0], PROBS[:3]),
    *(PROBS * NAN, 2 * PROBS, torch.tensor([[-0.5, 1.5]] * 4)),
)
classes = tensor | some(
    *(1, LABELS.tolist(), LABELS.numpy(), LABELS.double(), LABELS[:2], LABELS + 1, LABELS - 1, LABELS.bool()),
    torch.eye(2)[LABELS].long(),
)
scores = tensor | some(
    0.5, [0.1, 0.2], np.ones(2), torch.rand(2, 2), torch.ones(0), torch.tensor([NAN]), torch.tensor(1.0)
)
targets = tensor | some(
    1.0, [0.1, 0.2], np.ones(4), torch.full((4,), NAN), torch.rand(3), torch.rand(0), torch.rand(2, 2, 2)
)
logits = tensor | some(1.0, LOGITS.tolist(), LOGITS.numpy(), LOGITS[:, 0], LOGITS.long(), LOGITS * NAN, LOGITS + INF)
axes = some("x", 3, torch.ones(1))
levels = some("x", None, 0.0, 1.0, -0.5, NAN, INF, [0.5], True)
kinds = some(None, 3, "x", ["aps"])
results = mapping | some({}, [1], {"a": 3})


def quantiles():
    return torch.tensor([0.2, 0.8])[:, None].expand(2, 4)


def regression():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(scale=0.5))
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return {"model": model, "guide": guide}


def numbers(number=4):
    return Prediction(torch.zeros(8, number, 1), likelihoods.Gaussian(), {"scale": torch.ones(8, 1)})


def near(expected):
    return lambda found: bool(
        torch.isclose(torch.as_tensor(found).double(), torch.tensor(expected).double(), atol=1e-4)
    )


def with_legend(label):
    return lambda ax: ax.get_legend().get_texts()[0].get_text().startswith(label)


def curve():
    return referral_curve(accuracy, PROBS, LABELS, torch.tensor([0.1, 0.2, 0.4, 0.3]), [0.0, 0.25])


CALLS = [
    Call(
        "uncertainty.reliability",
        lambda: dict(probs=PROBS, labels=LABELS, num_bins=4),
        lambda found: found.count.tolist() == [0, 0, 2, 2],
        invalid=dict(probs=probabilities, labels=classes, num_bins=positive_int),
    ),
    Call(
        "uncertainty.expected_calibration_error",
        lambda: dict(probs=PROBS, labels=LABELS, num_bins=4),
        near(0.4),
        invalid=dict(probs=probabilities, labels=classes, num_bins=positive_int),
    ),
    Call(
        "uncertainty.auroc",
        lambda: dict(scores_negative=torch.tensor([0.1, 0.2]), scores_positive=torch.tensor([0.3])),
        lambda found: found == 1.0,
        invalid=dict(scores_negative=scores, scores_positive=scores),
    ),
    Call(
        "uncertainty.crps_from_draws",
        lambda: dict(draws=torch.tensor([[0.0], [2.0], [1.0]]).expand(3, 4), targets=torch.ones(4)),
        near(0.0),
        invalid=dict(
            draws=tensor
            | some(1.0, [[1.0]], np.ones((3, 4)), torch.rand(4), torch.rand(1, 4), torch.full((3, 4), NAN))
            | {"integers": torch.ones(3, 4, dtype=torch.long)},
            targets=targets,
        ),
    ),
    Call(
        "uncertainty.interval_coverage",
        lambda: dict(lower=torch.zeros(4), upper=torch.ones(4), targets=torch.tensor([-0.5, 0.2, 0.7, 0.9])),
        near(0.75),
        invalid=dict(
            lower=tensor | some(0.0, [0.0] * 4, torch.full((4,), 2.0), torch.full((4,), NAN), torch.zeros(4).long()),
            upper=tensor | some(1.0, [1.0] * 4, torch.ones(3), torch.full((4,), NAN)),
            targets=targets,
        ),
    ),
    Call(
        "uncertainty.quantile_calibration",
        lambda: dict(quantiles=quantiles(), levels=[0.2, 0.8], targets=torch.tensor([0.1, 0.5, 0.7, 0.9])),
        lambda found: found.share.tolist() == [0.25, 0.75],
        invalid=dict(
            quantiles=tensor
            | some(1.0, [[0.2]], torch.rand(3, 4), torch.rand(2), quantiles() * NAN, quantiles().long()),
            levels=some(None, "x", 0.5, [0.8, 0.2], [0.0, 1.0], [NAN, 0.5], []),
            targets=targets,
        ),
    ),
    Call(
        "uncertainty.referral_curve",
        lambda: dict(
            score=accuracy,
            predictions=PROBS,
            targets=LABELS,
            uncertainty=torch.tensor([0.1, 0.2, 0.4, 0.3]),
            shares=[0.0, 0.25],
            num_resamples=3,
            seed=1,
        ),
        lambda found: torch.allclose(found.score, torch.tensor([0.5, 2 / 3], dtype=torch.double)),
        invalid=dict(
            score=some(None, "x", 3, lambda p, t: NAN, lambda p, t: "x", lambda p, t: None),
            predictions=tensor | some(1.0, PROBS.tolist(), PROBS.numpy(), PROBS[:3]),
            targets=tensor | some(1.0, LABELS.tolist(), LABELS.numpy(), LABELS[:3]),
            uncertainty=scores,
            shares=some(None, "x", 0.1, [0.2, 0.1], [1.0], [-0.1], [NAN], []),
            num_resamples=positive_int | {"one": 1},
            seed=SEEDS,
        ),
    ),
    Call(
        "uncertainty.TemperatureScaling",
        lambda: dict(temperature=2.0),
        lambda found: found.temperature == 2.0,
        invalid=dict(temperature=positive_float | {"flag": True}),
    ),
    Call(
        "uncertainty.TemperatureScaling.__call__",
        lambda: dict(logits=LOGITS),
        lambda found: torch.allclose(found, (LOGITS / 2).softmax(-1)),
        invalid=dict(logits=logits),
        on=lambda: TemperatureScaling(2.0),
    ),
    Call(
        "uncertainty.TemperatureScaling.fit",
        lambda: dict(logits=LOGITS, labels=torch.tensor([0, 0, 1, 0])),
        lambda found: abs(found.temperature - 4 / math.log(3)) < 1e-6,
        invalid=dict(logits=logits, labels=classes),
    ),
    Call(
        "uncertainty.evaluate",
        lambda: (
            dict(regression(), test=(X, Y), ood=10 * X, num_samples=4, level=0.8)
            | dict(method="linearized", progress=False)
        ),
        lambda found: found.scores["RMSE"] > 0,
        invalid=dict(
            model=some(None, "x", 3) | {"without likelihood": nn.Linear(2, 1)},
            guide=some(None, "x", 3),
            test=some(None, "x", 3, X, (X,), (X, Y[:2]), (X * NAN, Y), (X, Y * NAN)),
            ood=some("x", 3, X * NAN, X[:0]),
            num_samples=optional(positive_int),
            method=name_of_one | {"class": AutoRadial},
            level=levels,
            progress=flag,
        ),
        also=(
            (dict(ood=None), lambda found: "AUROC, epistemic variance" not in found.scores),
            (dict(num_samples=None), lambda found: len(found.prediction.samples) == 64),
        ),
    ),
    Call(
        "uncertainty.ConformalSets",
        lambda: dict(level=0.9, threshold=0.8, score="lac"),
        lambda found: found.threshold == 0.8,
        invalid=dict(level=levels, threshold=some("x", None, NAN, INF, [0.5]), score=kinds),
    ),
    Call(
        "uncertainty.ConformalSets.fit",
        lambda: dict(probs=PROBS, labels=LABELS, level=0.7, score="lac"),
        lambda found: abs(found.threshold - 0.7) < 1e-6,
        invalid=dict(probs=probabilities, labels=classes, level=levels | {"few": 0.9}, score=kinds),
        also=((dict(score="aps"), lambda found: found.score == "aps"),),
    ),
    Call(
        "uncertainty.ConformalSets.__call__",
        lambda: dict(probs=PROBS),
        lambda found: found.tolist() == [[True, False], [False, True], [False, True], [True, False]],
        invalid=dict(probs=tensor | some(0.5, PROBS.tolist(), PROBS.long(), PROBS[:, 0], PROBS * NAN, 2 * PROBS)),
        on=lambda: ConformalSets(0.9, 0.5, "lac"),
    ),
    Call(
        "uncertainty.ConformalIntervals",
        lambda: dict(level=0.9, threshold=torch.ones(1), score="normalized"),
        lambda found: found.level == 0.9,
        invalid=dict(level=levels, threshold=tensor | some(1.0, torch.tensor([NAN]), torch.tensor([1])), score=kinds),
    ),
    Call(
        "uncertainty.ConformalIntervals.fit",
        lambda: dict(prediction=numbers(), targets=torch.arange(4.0), level=0.7, score="normalized"),
        lambda found: found.threshold.tolist() == [3.0],
        invalid=dict(
            prediction=some(None, "x", 3, torch.ones(4)), targets=targets, level=levels | {"few": 0.9}, score=kinds
        ),
        also=((dict(score="quantile"), lambda found: found.score == "quantile"),),
    ),
    Call(
        "uncertainty.ConformalIntervals.__call__",
        lambda: dict(prediction=numbers(2)),
        lambda found: [end.flatten().tolist() for end in found] == [[-2.0, -2.0], [2.0, 2.0]],
        invalid=dict(prediction=some(None, "x", 3, torch.ones(4))),
        on=lambda: ConformalIntervals(0.9, torch.tensor([2.0]), "normalized"),
    ),
    Call(
        "uncertainty.plots.plot_reliability",
        lambda: dict(reliabilities={"a": reliability(PROBS, LABELS)}, ax=None),
        with_legend("a (ECE"),
        invalid=dict(reliabilities=results | {"result": reliability(PROBS, LABELS)}, ax=axes),
    ),
    Call(
        "uncertainty.plots.plot_quantile_calibration",
        lambda: dict(curves={"a": quantile_calibration(quantiles(), [0.2, 0.8], torch.rand(4))}, ax=None),
        with_legend("a (gap"),
        invalid=dict(curves=results, ax=axes),
    ),
    Call(
        "uncertainty.plots.plot_referral",
        lambda: dict(curves={"a": curve()}, score="Accuracy", ax=None),
        lambda ax: ax.get_ylabel().startswith("Accuracy"),
        invalid=dict(curves=results, score=text, ax=axes),
    ),
    Call(
        "uncertainty.plots.plot_images",
        lambda: dict(
            images=torch.rand(3, 1, 4, 4), titles=["a", "b", "c"], num_columns=3, row_labels=["row"], figure=None
        ),
        lambda found: [ax.get_title() for ax in found] == ["a", "b", "c"],
        invalid=dict(
            images=tensor
            | some(
                3,
                torch.rand(4, 4),
                torch.full((3, 1, 4, 4), 2.0),
                torch.rand(3, 2, 4, 4),
                torch.full((3, 1, 4, 4), NAN),
            ),
            titles=some("x", 3, ["a"], [1, 2, 3]),
            num_columns=optional(positive_int),
            row_labels=some("xy", 3, ["a", "b"], [1]),
            figure=axes,
        ),
        also=((dict(titles=None, num_columns=None, row_labels=None), lambda found: len(found) == 3),),
    ),
]
