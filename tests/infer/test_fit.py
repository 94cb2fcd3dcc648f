# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Validation, early stopping, callbacks, and every way a fit can end badly."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer.training_run import TrainingRun
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import mean_only
from tests.infer.runs import FIT, ROWS, STEPS_PER_EPOCH, assert_same, data, function_problem, problem, state_of, trained

# -------------------------------------------------------------------------------- validation, early stop, callback


def test_validation_is_the_log_of_the_mean_probability_and_leaves_training_alone():
    epochs = []

    def keep(pair):
        return lambda record: epochs.append(state_of(*pair))

    for validation in (None, data(9, seed=4)):
        pair = problem("dropout")
        trained(*pair, validation=validation, callback=keep(pair))
    plain, validated = epochs[:3], epochs[3:]
    for one, other in zip(plain, validated, strict=True):
        assert_same(one, other)


def test_the_record_of_an_epoch_holds_the_validation_of_its_parameters():
    model, guide = problem()
    x, y = data(9, seed=4)
    _, result = trained(model, guide, validation=(x, y), epochs=1)
    torch.manual_seed(0)
    expected = -predict(model, guide, x, num_samples=16).log_prob(y).mean().item()
    assert result.history[0]["validation_nll"] == pytest.approx(expected, rel=1e-6)


def scripted_validation(monkeypatch, values):
    script = iter(values)
    monkeypatch.setattr(TrainingRun, "_validate", lambda self, validation: next(script))


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


def test_without_validation_the_last_epoch_counts():
    _, result = trained(*problem())
    assert (result.best_epoch, result.stopped_early) == (2, False)


def test_a_validation_that_is_infinite_at_first_does_not_hide_a_better_one(monkeypatch):
    scripted_validation(monkeypatch, [float("inf"), 2.0, 3.0])
    _, result = trained(*problem(), validation=data())
    assert result.best_epoch == 1


def test_a_callback_gets_each_record_and_stops_the_training():
    records = []

    def callback(record):
        records.append(record)
        return record["epoch"] == 1

    _, result = trained(*problem(), callback=callback)
    assert records == result.history
    assert [record["epoch"] for record in records] == [0, 1]
    assert result.stopped_early


def test_progress_shows_the_terms(capsys):
    trained(*problem(), progress=True)
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("12/12", "nll=", "kl="))


# ---------------------------------------------------------------------------------------------------- bad endings


def poison(pair, name, epoch):
    def callback(record):
        if record["epoch"] == epoch:
            dict(pair[1].named_parameters())[name].data.fill_(float("nan"))

    return callback


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("name", ["locs.2.weight_unconstrained", "scales.0.bias_unconstrained"])
def test_a_parameter_that_turns_nan_stops_training_by_name_and_no_checkpoint_holds_it(validate, name, tmp_path):
    path = tmp_path / "run.pt"
    pair = problem()
    with pyro.validation_enabled(validate), pytest.raises(FloatingPointError, match=f"parameter guide.{name}"):
        trained(*pair, checkpoint=path, checkpoint_every=1, callback=poison(pair, name, epoch=1))
    saved = torch.load(path, weights_only=True)
    assert (saved["epoch"], saved["step_in_epoch"]) == (1, STEPS_PER_EPOCH)
    assert all(value.isfinite().all() for value in saved["guide"].values())
    # The last good state is one to go on from.
    assert len(trained(*problem(), checkpoint=path, checkpoint_every=1)[1].history) == 3


class Overflowing(nn.Linear):
    """Overflows from its 9th call on, with every parameter finite."""

    calls = 0

    def forward(self, x):
        Overflowing.calls += 1
        return super().forward(x) * (float("inf") if Overflowing.calls > 8 else 1.0)


@pytest.mark.parametrize("validate", [True, False])
def test_a_likelihood_that_overflows_stops_training_by_the_name_of_its_site(validate, tmp_path):
    Overflowing.calls = 0
    model = SupervisedModel(BayesianModule(Overflowing(3, 2)), likelihoods.Gaussian(num_data=ROWS))
    guide = AutoRadial(model)
    y = torch.zeros(ROWS, 2)
    path = tmp_path / "run.pt"
    pyro.enable_validation(validate)
    try:
        with pytest.raises(FloatingPointError, match="log-likelihood of site 'y'"):
            trained(model, guide, data=(data()[0], y), checkpoint=path, checkpoint_every=1)
    finally:
        pyro.enable_validation(True)
    saved = torch.load(path, weights_only=True)
    assert 0 < saved["step_in_epoch"] < STEPS_PER_EPOCH
    assert_same(saved["guide"], guide.state_dict())


def test_a_draw_that_overflows_stops_training_by_the_name_of_its_site():
    model, guide = problem()

    def blow_up(record):
        for role in ("locs", "scales"):
            dict(guide.named_parameters())[f"{role}.2.weight_unconstrained"].data.fill_(3e38)

    with pytest.raises(FloatingPointError, match=r"epoch 1, step 0: a draw of site '2\.weight'"):
        trained(model, guide, callback=blow_up)


def test_a_far_too_large_learning_rate_stops_training(tmp_path):
    with pytest.raises(FloatingPointError, match="epoch 0"):
        trained(*problem(), optim=partial(SGD, lr=1e30))


def test_a_parameter_broken_by_the_very_last_step_is_named():
    class Breaking(SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.steps += 1
            if self.steps == FIT["epochs"] * STEPS_PER_EPOCH:
                self.param_groups[0]["params"][0].data.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="parameter"):
        trained(*problem(), optim=partial(Breaking, lr=0.0))


def test_a_validation_that_turns_nan_stops_training(monkeypatch):
    class Nan(likelihoods.Gaussian):
        def observation(self, f, **noise):
            distribution = super().observation(f, **noise)
            # Prediction gives draws a dim of their own.
            return distribution if f.dim() == 2 else dist.Normal(f * float("nan"), 1.0, validate_args=False).to_event(1)

    model, guide = problem(likelihood=Nan(num_data=ROWS))
    pair = data()[0], torch.zeros(ROWS, 2)
    with pytest.raises(FloatingPointError, match="validation"):
        trained(model, guide, data=pair, validation=pair)


def test_a_mistake_of_the_user_is_not_taken_for_a_number_that_is_not_finite():
    x, y = data()
    with pytest.raises(ValueError, match="y must hold integer labels"):
        trained(*problem(), data=(x, y.float()))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "setting",
    ["epochs", "batch_size", "accumulate", "patience", "checkpoint_every", "pretrain_epochs"],
)
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_count_that_is_none_is_named(setting, value):
    with pytest.raises(ValueError, match=f"fit: {setting} must be a positive integer"):
        trained(*problem(), validation=data(), **{setting: value})


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def nan_in(rows):
    x, y = data()
    x[rows] = float("nan")
    return x, y


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": nan_in([4, 7])}, "data: x holds NaN in 2 of 20 rows, first in row 4"),
        ({"data": TensorDataset(*nan_in([4, 7]))}, r"data: x holds NaN in \d of \d rows, first in row [47]"),
        ({"validation": nan_in([19])}, "validation: x holds NaN in 1 of 20 rows, first in row 19"),
        ({"data": (data()[0], data(9)[1])}, "data: x has 20 rows and y has 9"),
        ({"data": (data()[0][:0], data()[1][:0])}, "data has no rows"),
        ({"data": data()[0]}, r"data must be a pair \(x, y\) of tensors or a torch Dataset, got Tensor"),
        ({"data": (data()[0].numpy(), data()[1])}, "data: x must be a tensor of rows"),
        ({"data": DataLoader(TensorDataset(*data()))}, "got DataLoader"),
        ({"data": Stream()}, "data must be a map-style Dataset"),
        ({"patience": 2}, "patience needs validation"),
        ({"loss": pyro.infer.Trace_ELBO()}, "loss must keep its terms"),
        ({"loss": 3}, "loss must keep its terms"),
        ({"optim": pyro.optim.Adam(lambda name: {"lr": 1e-3})}, "one setting for all parameters"),
        ({"optim": pyro.optim.Adam({"lr": 1e-3}, {"clip_norm": 1.0})}, "no clipping"),
        (
            {"optim": pyro.optim.ExponentialLR({"optimizer": Adam, "optim_args": {"lr": 1e-3}, "gamma": 0.1})},
            "no learning rate schedule",
        ),
        ({"optim": Adam([torch.zeros(1, requires_grad=True)])}, "optim must be a function"),
        ({"optim": 1e-3}, "optim must be a function"),
    ],
)
def test_bad_input_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        trained(*problem(), **settings)


def test_data_with_nan_are_named_before_anything_is_trained():
    model, guide = problem()
    with pytest.raises(ValueError, match="NaN"):
        trained(model, guide, validation=nan_in([0]))
    assert guide.prototype_trace is None


def test_a_guide_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"guide must be an nn\.Module"):
        fit(problem()[0], lambda x, y: None, data(), **FIT)


def test_validation_without_a_likelihood_is_refused_before_training():
    model, guide = function_problem()
    with pytest.raises(ValueError, match="validation needs a model with an attribute `likelihood`"):
        trained(model, guide, validation=data())
    assert guide.prototype_trace is None


def test_a_mean_only_context_of_the_user_does_not_outlive_the_run():
    model, guide = problem()
    trained(model, guide, pretrain_epochs=1, epochs=1)
    x, y = data()
    with mean_only():
        assert torch.equal(guide(x, y)["2.bias"], guide.median()["2.bias"])
    assert not torch.equal(guide(x, y)["2.bias"], guide.median()["2.bias"])
