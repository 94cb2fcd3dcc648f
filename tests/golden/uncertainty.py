# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores and calibration of predictions."""

import torch

from pyro_radial.uncertainty import (
    TemperatureScaling,
    auroc,
    crps_from_draws,
    expected_calibration_error,
    interval_coverage,
    quantile_calibration,
    referral_curve,
    reliability,
)
from pyro_radial.uncertainty.metrics import accuracy
from tests.golden.programs import program


def probabilities(rows=60, classes=3):
    torch.manual_seed(1)
    logits = 2.0 * torch.randn(rows, classes)
    return logits.softmax(-1), torch.distributions.Categorical(logits=0.7 * logits).sample()


@program
def scores():
    probs, labels = probabilities()
    entropy = -(probs * probs.log()).sum(-1)
    wrong = probs.argmax(-1) != labels
    draws, targets = torch.randn(20, 30), torch.randn(30)
    curve = reliability(probs, labels, num_bins=5)
    levels = torch.tensor([0.1, 0.5, 0.9])
    return {
        "accuracy": accuracy(probs, labels),
        "calibration error": expected_calibration_error(probs, labels),
        "reliability": [curve.confidence.nan_to_num(-1.0), curve.accuracy.nan_to_num(-1.0), curve.count],
        "auroc": auroc(entropy[~wrong], entropy[wrong]),
        "crps": crps_from_draws(draws, targets),
        "coverage": interval_coverage(draws.quantile(0.1, 0), draws.quantile(0.9, 0), targets),
        "quantiles": quantile_calibration(draws.quantile(levels, 0), levels, targets).frequency,
    }


@program
def referral():
    probs, labels = probabilities()
    entropy = -(probs * probs.log()).sum(-1)
    curve = referral_curve(accuracy, probs, labels, entropy, num_resamples=20)
    return {"score": curve.score, "resamples": curve.resamples}


@program
def temperature():
    probs, labels = probabilities()
    scaling = TemperatureScaling.fit(probs, labels)
    return {"temperature": scaling.temperature, "scaled": scaling(probs)}
