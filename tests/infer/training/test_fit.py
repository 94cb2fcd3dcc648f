# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Validation, early stopping, callbacks, and every way a fit can end badly."""

from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pyro_radial import AutoRadial, BayesianModule, fit
from pyro_radial.infer.training import training_run
from pyro_radial.poutine import mean_only, swap_prior
from tests.helpers.runs import FIT, ROWS, assert_same, data, function_problem, problem, state_of, trained

# ---------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("joined", [True, False], ids=["torch.distributed", "environment"])
def test_one_of_several_processes_is_sent_to_the_page_on_them(joined, monkeypatch):
    if joined:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    else:
        monkeypatch.setenv("WORLD_SIZE", "2")
    model, guide = problem()
    with pytest.raises(RuntimeError, match=r"fit trains in one process, got WORLD_SIZE=2; .*docs/scale\.md"):
        trained(model, guide)
    assert guide.prototype_trace is None


def test_a_single_process_of_a_launcher_trains(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    _, result = trained(*problem())
    assert len(result.history) == FIT["epochs"]
    # Without validation the last epoch counts.
    assert (result.best_epoch, result.stopped_early) == (2, False)


def test_the_page_on_scale_has_the_section_that_the_error_names():
    page = Path(__file__).resolve().parents[3] / "docs" / "scale.md"
    assert "## Several processes" in page.read_text()


# -------------------------------------------------------------------------------- validation, early stop, callback


def scripted_validation(monkeypatch, values):
    script = iter(values)
    monkeypatch.setattr(training_run.TrainingRun, "_validate", lambda *_: next(script))


def test_the_best_parameters_come_back_and_patience_counts_epochs_without_a_better_one(monkeypatch):
    model, guide = problem("batch norm")
    scripted_validation(monkeypatch, [3.0, 1.0, 2.0, 1.0, 0.5])
    epochs = []
    state, result = trained(
        model,
        guide,
        epochs=9,
        validation=data(),
        patience=2,
        callback=lambda record: epochs.append(state_of(model, guide)),
    )
    # An equal value is no better one.
    assert [record["validation_nll"] for record in result.history] == [3.0, 1.0, 2.0, 1.0]
    assert (result.best_epoch, result.stopped_early) == (1, True)
    assert_same(state, epochs[1])
    assert any(not torch.equal(epochs[3][name], value) for name, value in state.items())


def test_a_callback_gets_each_record_and_stops_the_training():
    records = []

    def callback(record):
        records.append(record)
        return record["epoch"] == 1

    _, result = trained(*problem(), callback=callback)
    assert records == result.history
    assert [record["epoch"] for record in records] == [0, 1]
    assert result.stopped_early


@pytest.mark.parametrize(("rate", "epochs", "far"), [(3.0, 25, True), (0.01, 25, False), (3.0, 2, False)])
def test_a_loss_that_ends_far_above_its_start_is_named(recwarn, rate, epochs, far):
    """The first rate is far too large; two epochs are too short to judge."""
    trained(*problem(), optim=partial(Adam, lr=rate), epochs=epochs)
    messages = [str(warning.message) for warning in recwarn]
    assert ["far above its start" in message and "learning rate" in message for message in messages] == [True] * far


def test_progress_shows_the_terms(capsys):
    trained(*problem(), progress=True)
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("12/12", "nll=", "kl="))


# ------------------------------------------------------------------------------------------------------ bad input


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Table:
    """What a DataFrame has."""

    def to_numpy(self):
        return data()[0].numpy()


def nan_in(rows):
    x, y = data()
    x[rows] = float("nan")
    return x, y


def infinity_in(rows):
    x, y = data()
    x[rows, 1] = float("inf")
    return x, y


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": nan_in([4, 7])}, "data: x must not hold NaN, got NaN in 2 of 20 rows, first in row 4"),
        ({"data": TensorDataset(*nan_in([4, 7]))}, r"data: x .* got NaN in \d of \d rows, first in row [47]"),
        ({"validation": nan_in([19])}, "validation: x must not hold NaN, got NaN in 1 of 20 rows, first in row 19"),
        ({"data": DataLoader(Stream())}, "data must be a map-style Dataset"),
        ({"data": infinity_in([4, 7])}, "data: x must not hold infinity, got infinity in 2 of 20 rows, first in row 4"),
        ({"validation": infinity_in([19])}, "validation: x must not hold infinity, .* first in row 19"),
        ({"data": (data()[0], data()[1] + 1)}, r"y must hold labels from 0 to 1, of 2 classes, .*got 2 at"),
        ({"data": (torch.zeros(ROWS, 7), data()[1])}, r"the network of bnn.* given x of shape \[2, 7\]"),
        ({"seed": 2**32}, r"seed must be less than 2\*\*32, got 4294967296"),
        ({"data": Table()}, r"data must be a pair .*, got Table, whose to_numpy\(\) is an array"),
        ({"data": (Table(), data()[1])}, r"data: x must be a tensor of rows .*, got Table, whose to_numpy\(\)"),
        ({"data": (data()[0], Table())}, r"data: y must be a tensor of rows .*, got Table, whose to_numpy\(\)"),
        ({"optim": LBFGS}, "optim must make an optimizer that steps without a closure, got LBFGS"),
        ({"data": Stream()}, "data must be a map-style Dataset"),
        ({"patience": 2}, "validation must be given with patience, got patience=2"),
        (
            {"optim": pyro.optim.ExponentialLR({"optimizer": Adam, "optim_args": {"lr": 1e-3}, "gamma": 0.1})},
            "no learning rate schedule.*got PyroLRScheduler",
        ),
        ({"scheduler_interval": "step"}, "scheduler_interval must be left out without a scheduler, got 'step'"),
        (
            {"scheduler": ReduceLROnPlateau, "scheduler_interval": "step"},
            "scheduler_interval must be 'epoch' with ReduceLROnPlateau.*got 'step'",
        ),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        trained(*problem(), **settings)


@pytest.mark.parametrize("model", [None, nn.Linear(3, 2), BayesianModule(nn.Linear(3, 2)), lambda x: None])
def test_a_model_without_targets_is_refused(model):
    with pytest.raises(ValueError, match=r"model must be a Pyro model of inputs and targets, model\(x, y\)"):
        fit(model, problem()[1], data(), **FIT)


@pytest.mark.parametrize(
    "wrapped",
    [partial(poutine.scale, scale=1.0), lambda model: swap_prior(model, {}), partial, lambda model: model.forward],
    ids=["scale", "swap_prior", "partial", "method"],
)
def test_a_model_in_any_wrapping_is_taken(wrapped):
    model, guide = problem()
    assert len(fit(wrapped(model), guide, data(), **{**FIT, "epochs": 1}).history) == 1


def test_a_model_that_does_not_observe_its_targets_is_refused_before_the_first_step():
    def model(x, y):
        pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    steps = []
    with pytest.raises(ValueError, match="model must observe the targets in a sample site"):
        fit(model, AutoRadial(model), data(), callback=steps.append, **FIT)
    assert not steps


def test_validation_without_a_likelihood_is_refused_before_training():
    model, guide = function_problem()
    with pytest.raises(ValueError, match="model must have an attribute `likelihood` for validation"):
        trained(model, guide, validation=data())
    assert guide.prototype_trace is None


def test_a_mean_only_context_of_the_user_does_not_outlive_the_run():
    model, guide = problem()
    trained(model, guide, mean_only_epochs=1, epochs=1)
    x, y = data()
    with mean_only():
        assert torch.equal(guide(x, y)["2.bias"], guide.median()["2.bias"])
    assert not torch.equal(guide(x, y)["2.bias"], guide.median()["2.bias"])
