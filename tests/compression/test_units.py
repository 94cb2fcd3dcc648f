# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Cuts and scores hold vectors of the right kind."""

import pytest
import torch

from pyro_radial.compression import Cut, Scores


@pytest.mark.parametrize("side", ["outputs", "inputs"])
@pytest.mark.parametrize("mask", [torch.tensor([1, 0]), torch.tensor([[True]]), torch.tensor([1.0])])
def test_masks_are_boolean_vectors(side, mask):
    with pytest.raises(ValueError, match=rf"{side}\['fc'\] must be a boolean vector"):
        Cut(**{side: {"fc": mask}})


@pytest.mark.parametrize("side", ["outputs", "inputs"])
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.tensor([1, 2]), "one floating point number per unit"),
        (torch.zeros(2, 2), "one floating point number per unit"),
        (torch.zeros(0), "one floating point number per unit"),
        (torch.tensor([0.0, torch.nan]), "less than infinity, and not NaN"),
        (torch.tensor([0.0, torch.inf]), "less than infinity, and not NaN"),
    ],
)
def test_scores_are_vectors_of_numbers(side, scores, message):
    with pytest.raises(ValueError, match=rf"{side}\['fc'\] must be .*{message}"):
        Scores(**{side: {"fc": scores}})


def test_no_scores_are_refused():
    with pytest.raises(ValueError, match="must hold scores"):
        Scores()


def test_threshold_keeps_the_units_that_reach_it():
    scores = Scores(outputs={"0": torch.tensor([-1.0, 0.0, 1.0])}, inputs={"0": torch.tensor([-torch.inf, 0.5])})
    cut = scores.at_least(0.0)
    assert cut.outputs["0"].tolist() == [False, True, True]
    assert cut.inputs["0"].tolist() == [False, True]
    assert repr(cut) == "Cut(outputs={'0': 2 of 3}, inputs={'0': 1 of 2})"
