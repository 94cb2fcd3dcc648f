# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import TemperatureScaling
from tests.helpers.predictions import simulate


@pytest.mark.parametrize("right", [3, 7, 9])
@pytest.mark.parametrize("gap", [1e-3, 1.0, 300.0])
def test_two_logits_are_in_closed_form(right, gap):
    """All points alike, ``right`` of ten right: the temperature makes that share the confidence."""
    logits = torch.tensor([[gap, 0.0]], dtype=torch.float64).expand(10, 2)
    labels = torch.ones(10, dtype=torch.long)
    labels[:right] = 0
    if right < 5:  # Worse than chance has no temperature.
        with pytest.raises(ValueError, match="no better than chance"):
            TemperatureScaling.fit(logits, labels)
        return
    scaling = TemperatureScaling.fit(logits, labels)
    assert scaling.temperature == pytest.approx(gap / math.log(right / (10 - right)), rel=1e-12)
    assert scaling(logits)[:, 0].tolist() == pytest.approx([right / 10] * 10, rel=1e-12)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_the_temperature_that_labels_were_drawn_at_is_found(factor):
    """To a few standard errors from the curvature, the variance of the logits; log-probabilities are as good."""
    probs, labels = simulate(5_000, 5)
    log_probs = probs.log()
    means = (probs * log_probs).sum(-1)
    information = ((probs * log_probs.square()).sum(-1) - means.square()).sum()
    scaling = TemperatureScaling.fit(factor * log_probs + 3.0, labels)
    assert factor / scaling.temperature == pytest.approx(1.0, abs=4 / math.sqrt(information))
    again = TemperatureScaling.fit((factor * log_probs).softmax(-1).log(), labels)
    assert again.temperature == pytest.approx(scaling.temperature, rel=1e-9)


def test_a_prediction_is_averaged_before_it_is_scaled():
    samples = 3 * torch.randn(6, 50, 3, dtype=torch.float64)
    labels = torch.randint(3, (50,))
    labels[:40] = samples.softmax(-1).mean(0).argmax(-1)[:40]
    prediction = Prediction(samples, likelihoods.Categorical())
    scaling = TemperatureScaling.fit(prediction, labels)
    expected = TemperatureScaling.fit(prediction.mean.log(), labels)
    assert scaling.temperature == pytest.approx(expected.temperature, rel=1e-9)
    torch.testing.assert_close(scaling(prediction), scaling(prediction.mean.log()))
    torch.testing.assert_close(TemperatureScaling(1.0)(prediction), prediction.mean)


def test_impossible_classes_stay_impossible():
    probs = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.8, 0.2], [0.7, 0.3, 0.0]])
    scaling = TemperatureScaling.fit(probs.log(), torch.tensor([0, 1, 1]))
    scaled = scaling(probs.log())
    assert torch.equal(scaled == 0, probs == 0)
    without = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    same = TemperatureScaling.fit(without.log(), torch.tensor([0, 0, 1]))
    assert scaling.temperature == pytest.approx(same.temperature, rel=1e-6)


LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
RATES = torch.zeros(2, 3, 1)
IMPOSSIBLE = torch.tensor([[0.0, -math.inf], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (LOGITS, torch.tensor([0, 1]), "labels must hold a point whose most probable class is not .* 2 right of 2"),
        (LOGITS * 0, torch.tensor([0, 1]), "labels must have logits above the mean"),
        (IMPOSSIBLE, torch.tensor([1, 1]), "labels must have positive probability"),
        (torch.full((1, 2), -math.inf), torch.tensor([0]), "logits must be numbers below infinity"),
        (Prediction(RATES, likelihoods.Poisson()), torch.tensor([0]), "logits must be a prediction .* got Poisson"),
        (Prediction(RATES), torch.tensor([0]), "logits must be a prediction .* got NoneType"),
    ],
)
def test_bad_arguments_are_named(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        TemperatureScaling.fit(logits, labels)
