# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Records, the best epoch, and the sums of an epoch."""

import math

import pytest
import torch

from pyro_radial.infer.training.progress import Progress

INF = math.inf


def progress():
    return Progress(torch.zeros(3, dtype=torch.float64))


def after_epochs(scores):
    """The progress after epochs with these validations."""
    run = progress()
    for epoch, score in enumerate(scores):
        improved = {"epoch": epoch} if run.improves(score) else None
        run.end_epoch({"validation_nll": score}, improved)
    return run


@pytest.mark.parametrize(
    ("scores", "best_epoch", "waited"),
    [
        ([3.0, 1.0, 2.0], 1, 1),
        ([3.0, 1.0, 1.0], 1, 1),  # An equal value is no better one.
        ([INF, 2.0, 3.0], 1, 1),
        ([-INF, 2.0, 3.0], 1, 1),  # A density without bound hides no better one.
        ([2.0, -INF, 3.0], 0, 2),
        ([INF, -INF, INF], 2, 2),  # One that is never finite chooses nothing: the last epoch counts.
        ([math.nan, 2.0, 3.0], 1, 1),
    ],
)
def test_the_best_epoch_is_that_of_the_least_finite_validation(scores, best_epoch, waited):
    run = after_epochs(scores)
    assert (run.best_epoch, run.epochs_since_best, run.epoch) == (best_epoch, waited, len(scores))
    assert run.best == ({"epoch": best_epoch} if math.isfinite(scores[best_epoch]) else None)


def test_an_epoch_sums_its_steps_by_their_rows():
    run = progress()
    run.add_step(torch.tensor([1.0, 2.0, 3.0]), 0.5, rows=6, all_rows=8)
    run.add_step(torch.tensor([5.0, 6.0, 7.0]), 0.7, rows=2, all_rows=8)
    assert run.sums.tolist() == [2.0, 3.0, 4.0]
    assert run.start == {"loss": 1.0, "nll": 2.0, "kl": 3.0, "kl_weight": 0.5}
    assert (run.kl_weight, run.step_in_epoch) == (0.7, 2)
    run.end_epoch({}, None)
    assert (run.sums.tolist(), run.step_in_epoch) == ([0.0] * 3, 0)


def test_a_state_holds_all_of_it():
    run = after_epochs([3.0, 1.0])
    run.add_step(torch.tensor([1.0, 2.0, 3.0]), 0.5, rows=6, all_rows=8)
    run.ended = True
    loaded = progress()
    loaded.load_state_dict(run.state_dict())
    assert loaded.sums.tolist() == [0.75, 1.5, 2.25]
    assert (loaded.best_epoch, loaded.epoch, loaded.step_in_epoch, loaded.ended) == (1, 2, 1, True)
    assert loaded.history == run.history
