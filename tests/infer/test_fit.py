# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training: it equals the loop that a user would write, and nothing that happens to it on the way changes it."""

import random
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.infer.training_run import TrainingRun
from pyro_radial.nn import likelihoods
from pyro_radial.poutine import mean_only

ROWS = 20
FIT = {"epochs": 3, "batch_size": 6, "seed": 5, "progress": False}
STEPS_PER_EPOCH = 4

NETS = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)),
}


def data(rows=ROWS, seed=3):
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(-1) > 0).long()


def problem(net="plain", guide=AutoRadial, likelihood=None):
    """The same model and guide at every call."""
    torch.manual_seed(1)
    model = SupervisedModel(BayesianModule(NETS[net]()), likelihood or likelihoods.Categorical(num_data=ROWS))
    return model, guide(model)


def function_problem():
    """A model that is a plain function, with a parameter of its own and another one in a closure."""
    pyro.clear_param_store()
    torch.manual_seed(1)
    bnn = BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)))

    def model(x, y=None):
        f = bnn(x).squeeze(-1)
        scale = pyro.param("noise", lambda: torch.tensor(0.7), constraint=constraints.positive)
        with pyro.plate("data", ROWS if y is not None else len(x), subsample=torch.arange(len(x))):
            f = pyro.deterministic("f", f)
            pyro.sample("y", dist.Normal(f, scale), obs=None if y is None else y.to(f.dtype))

    return model, AutoRadial(model)


def state_of(model, guide):
    state = {f"guide.{name}": value for name, value in guide.state_dict().items()}
    if isinstance(model, nn.Module):
        state |= {f"model.{name}": value for name, value in model.state_dict().items()}
    else:
        store = pyro.get_param_store()
        # A guide's name in the store differs from instance to instance, and its values are in its state.
        state |= {name: store[name].detach() for name in store if not name.startswith("Auto")}
        state = {re.sub("BayesianModule[_0-9]*", "bnn", name): value for name, value in state.items()}
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def trained(model, guide, **kwargs):
    result = fit(model, guide, kwargs.pop("data", data()), **{**FIT, **kwargs})
    return state_of(model, guide), result


@contextmanager
def killed(monkeypatch, method, at, when):
    """Interrupts the ``at``-th call of a method of the run, before or after it has done its work."""
    original, calls = getattr(TrainingRun, method), 0

    def interrupted(self, *args):
        nonlocal calls
        calls += 1
        if calls == at and when == "before":
            raise KeyboardInterrupt
        value = original(self, *args)
        if calls == at:
            raise KeyboardInterrupt
        return value

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


# ------------------------------------------------------------------------------------------------------- resume

SCENARIOS = {
    "plain": (problem, {}),
    "no seed": (problem, {"seed": None}),
    "dropout": (partial(problem, "dropout"), {}),
    "batch norm": (partial(problem, "batch norm"), {}),
    "validation": (partial(problem, "batch norm"), {"validation": data(9, seed=4), "patience": 2}),
    "schedule": (problem, {"loss": lambda: RadialELBO(kl_weight=lambda step: min(1.0, step / 7))}),
    "accumulate": (partial(problem, "dropout"), {"accumulate": 2}),
    "pretraining": (problem, {"pretrain_epochs": 1}),
    "momentum": (problem, {"optim": partial(SGD, lr=1e-3, momentum=0.9)}),
    "pyro optimiser": (problem, {"optim": pyro.optim.ClippedAdam({"lr": 1e-2, "lrd": 0.99})}),
    "two particles": (problem, {"loss": lambda: RadialELBO(num_particles=2)}),
    "mean field": (partial(problem, guide=AutoMeanField), {}),
    "model function": (function_problem, {}),
}
# (method, call, when): inside a step, between steps, between the last step of an epoch and its end, between epochs.
KILLS = [
    ("_accumulate_gradients", 3, "after"),
    ("step", 7, "after"),
    ("end_epoch", 1, "before"),
    ("end_epoch", 2, "after"),
]
# Every scenario is killed within an epoch and at its end, those with the most state also elsewhere.
CASES = [
    (kind, moment)
    for kind in SCENARIOS
    for moment in KILLS
    if moment in KILLS[1:3] or kind in ("validation", "schedule")
]


def run(kind, **kwargs):
    make, settings = SCENARIOS[kind]
    model, guide = make()
    fresh = {"loss": settings["loss"]()} if "loss" in settings else {}
    torch.manual_seed(8)
    return trained(model, guide, **{**settings, **fresh, **kwargs})


undisturbed = cache(run)


@pytest.mark.parametrize(("kind", "moment"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_a_killed_run_ends_bit_for_bit_where_an_undisturbed_one_does(kind, moment, tmp_path, monkeypatch):
    state, result = undisturbed(kind)
    assert len(result.history) == FIT["epochs"] or result.stopped_early
    kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1 if moment[0] == "end_epoch" else 2}
    with killed(monkeypatch, *moment):
        run(kind, **kept)
    resumed_state, resumed = run(kind, **kept)
    assert resumed == result
    assert_same(resumed_state, state)


def test_a_run_killed_after_every_step_still_ends_where_an_undisturbed_one_does(tmp_path, monkeypatch):
    state, result = trained(*problem("dropout"))
    for _ in range(FIT["epochs"] * STEPS_PER_EPOCH):
        with killed(monkeypatch, "save", 2, "before"):
            trained(*problem("dropout"), checkpoint=tmp_path / "run.pt", checkpoint_every=1)
    resumed_state, resumed = trained(*problem("dropout"), checkpoint=tmp_path / "run.pt", checkpoint_every=1)
    assert resumed == result
    assert_same(resumed_state, state)


SCRIPT = """
import os, signal, sys, torch
from tests.infer.test_fit import FIT, data, problem
from pyro_radial import fit
from pyro_radial.infer import training_run

torch.set_num_threads(1)
original = torch.save

def save(state, file):
    if state["epoch"] == 1 and state["step_in_epoch"] == 3:
        file.write(b"half a file")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    original(state, file)

torch.save = save
fit(*problem("dropout"), data(), checkpoint=sys.argv[1], checkpoint_every=1, **FIT)
"""


def test_a_process_killed_by_sigkill_while_it_writes_resumes_bit_for_bit(tmp_path):
    path = tmp_path / "run.pt"
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(path)]
    process = subprocess.run(command, timeout=120, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    saved = torch.load(path, weights_only=True)
    assert (saved["epoch"], saved["step_in_epoch"]) == (1, 2)
    state, result = trained(*problem("dropout"))
    resumed_state, resumed = trained(*problem("dropout"), checkpoint=path, checkpoint_every=1)
    assert resumed == result
    assert_same(resumed_state, state)


class Augmented(Dataset):
    """Items that change with Python's and NumPy's random numbers."""

    def __init__(self):
        self.x, self.y = data()

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.x[i] * (1 + random.random()) + np.float32(np.random.rand()), self.y[i]  # noqa: NPY002


def test_a_resumed_run_sees_the_same_augmented_items(tmp_path, monkeypatch):
    state, result = trained(*problem(), data=Augmented())
    kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1, "data": Augmented()}
    with killed(monkeypatch, "step", 6, "before"):
        trained(*problem(), **kept)
    random.seed(99)
    resumed_state, resumed = trained(*problem(), **kept)
    assert resumed == result
    assert_same(resumed_state, state)


def test_a_finished_run_goes_on_with_more_epochs_as_if_it_had_been_longer(tmp_path):
    long_state, long = trained(*problem(), epochs=5)
    trained(*problem(), epochs=2, checkpoint=tmp_path / "run.pt")
    state, result = trained(*problem(), epochs=5, checkpoint=tmp_path / "run.pt")
    assert result == long
    assert_same(state, long_state)


def test_a_finished_run_called_again_changes_nothing(tmp_path):
    kept = {"validation": data(9, seed=4), "checkpoint": tmp_path / "run.pt"}
    state, result = trained(*problem(), **kept)
    again_state, again = trained(*problem(), **kept)
    assert again == result
    assert_same(again_state, state)


def test_a_run_stopped_by_its_callback_stays_stopped_when_resumed(tmp_path):
    kept = {"checkpoint": tmp_path / "run.pt", "callback": lambda record: record["epoch"] == 1}
    state, result = trained(*problem(), **kept)
    assert result.stopped_early
    assert len(result.history) == 2
    again_state, again = trained(*problem(), **kept)
    assert again == result
    assert_same(again_state, state)


# --------------------------------------------------------------------------------------------- what a step does


def test_one_epoch_equals_the_loop_written_by_hand():
    x, y = data()
    model, guide = problem("batch norm")
    guide.setup(x, y)
    loss = RadialELBO()(model, guide)
    optimizer = Adam(loss.parameters(), lr=1e-2)
    pyro.set_rng_seed(FIT["seed"])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(FIT["seed"]))
    total = 0.0
    for rows in order.split(6):
        optimizer.zero_grad()
        value = loss(x[rows], y[rows])
        value.backward()
        optimizer.step()
        total += value.item() * len(rows) / ROWS
    expected = state_of(model, guide)
    other, other_guide = problem("batch norm")
    other_guide.setup(x, y)
    state, result = trained(other, other_guide, epochs=1, optim=partial(Adam, lr=1e-2))
    assert_same(state, expected)
    # The record sums in doubles what the loss sums in single precision.
    assert result.history[0]["loss"] == pytest.approx(total / ROWS, rel=1e-5)


def test_each_epoch_sees_every_row_once_in_an_order_of_its_own():
    seen = []

    class Watched(TensorDataset):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    trained(*problem(), data=Watched(*data()), epochs=3)
    # The first two rows are also looked at once, to make the parameters.
    epochs = [seen[2 + k * ROWS : 2 + (k + 1) * ROWS] for k in range(3)]
    assert len(seen) == 2 + 3 * ROWS
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_of_a_batch_equal_the_whole_in_gradients_and_terms(parts):
    """Batches of 20 in parts of 10 and 10; 7, 7 and 6; 3 six times and 2."""

    def gradients(accumulate):
        model, guide = problem(guide=partial(AutoRadial, init_stddev=0.3))
        # Leaves the parameters where they are, with the gradients in place.
        optim = partial(SGD, lr=0.0)
        result = fit(model, guide, data(), accumulate=accumulate, optim=optim, **{**FIT, "batch_size": 20, "epochs": 1})
        return {name: p.grad for name, p in guide.named_parameters()}, result.history[0]

    whole, whole_record = gradients(1)
    split, split_record = gradients(parts)
    for name, value in whole.items():
        # Single precision: 20 terms summed in another order, of the size of the largest gradient of the site.
        assert torch.allclose(split[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max())), name
        assert float(value.abs().max()) > 0
    # The KL sees no data, so each part has the same one, and their weighted sum is that one again.
    assert split_record == pytest.approx(whole_record, rel=1e-5)


def test_an_sgd_step_on_parts_ends_where_one_on_the_whole_batch_does():
    settings = {"optim": partial(SGD, lr=1e-3), "batch_size": 10, "epochs": 2}
    whole, _ = trained(*problem(), **settings)
    split, _ = trained(*problem(), accumulate=3, **settings)
    start = state_of(*_set_up(problem()))
    for name, value in whole.items():
        moved = float((value - start[name]).abs().max())
        # Rounding of gradients, and of the parameters themselves (1e-7 of values of order one), in four steps.
        assert torch.allclose(split[name], value, rtol=0, atol=1e-4 * moved + 1e-6), name


def _set_up(pair):
    pair[1].setup(*data())
    return pair


def test_a_schedule_of_the_kl_weight_counts_optimiser_steps_however_batches_are_split():
    for accumulate in (1, 3):
        seen = []

        def schedule(step, seen=seen):
            seen.append(step)
            return step / 100

        _, result = trained(*problem(), loss=RadialELBO(kl_weight=schedule), accumulate=accumulate)
        steps = sorted(set(seen) - {0})
        assert steps == list(range(1, 12))
        assert [record["kl_weight"] for record in result.history] == [0.03, 0.07, 0.11]


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField])
def test_pretraining_moves_means_and_no_scale(guide):
    model, made = problem(guide=guide)
    made.setup(*data())
    before = state_of(model, made)
    state, result = trained(model, made, pretrain_epochs=2, epochs=2)
    for name, value in before.items():
        assert torch.equal(state[name], value) == ("scales" in name), name
    assert [record["kl_weight"] for record in result.history] == [0.0, 0.0]
    moved, _ = trained(*problem(guide=guide), pretrain_epochs=1, epochs=2)
    assert all(not torch.equal(moved[name], before[name]) for name in before)


def test_the_loss_of_pretraining_is_that_of_the_mean_network():
    model, guide = problem()
    x, y = data()
    _, result = trained(model, guide, pretrain_epochs=1, epochs=1, optim=partial(SGD, lr=0.0))
    logits = model.bnn.to_module(guide.median())(x)
    expected = nn.functional.cross_entropy(logits, y).item()
    # Batches are summed in another order than the whole.
    assert result.history[0]["nll"] == pytest.approx(expected, rel=1e-5)
    assert result.history[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_pyro_optimiser_trains_as_its_torch_one_does():
    state, result = trained(*problem(), optim=partial(Adam, lr=0.02, betas=(0.8, 0.9)))
    other, other_result = trained(*problem(), optim=pyro.optim.Adam({"lr": 0.02, "betas": (0.8, 0.9)}))
    assert other_result == result
    assert_same(other, state)


def test_the_model_gets_trained_too():
    model, guide = problem("batch norm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, guide)
    assert not torch.equal(model.state_dict()["bnn.net.1.weight"], before["bnn.net.1.weight"])
    assert not torch.equal(model.state_dict()["bnn.net.1.running_mean"], before["bnn.net.1.running_mean"])


def test_parameters_of_a_model_function_are_trained():
    model, guide = function_problem()
    trained(model, guide, epochs=1)
    store = pyro.get_param_store()
    assert float(store["noise"].detach()) != pytest.approx(0.7, abs=1e-6)
    (norm,) = [name for name in store if name.endswith("1.weight") and "Auto" not in name]
    assert not torch.equal(store[norm].detach(), torch.ones(4))


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta, AutoRadial, AutoMeanField])
def test_any_guide_trains_and_predicts_with_parameters_in_the_store_or_in_modules(guide, local):
    with pyro.settings.context(module_local_params=local):
        model, made = problem("batch norm", guide=guide)
        made(*data())
        before = state_of(model, made)
        state, _ = trained(model, made, epochs=2, pretrain_epochs=1)
        assert all(not torch.equal(state[name], value) for name, value in before.items() if "num_batches" not in name)
        assert predict(model, made, data()[0], num_samples=2).mean.shape == (ROWS, 2)


def test_local_and_stored_parameters_train_alike():
    states = []
    for local in (False, True):
        with pyro.settings.context(module_local_params=local):
            states.append(trained(*problem("batch norm"))[0])
    assert_same(*states)


def test_a_dataset_trains_as_its_tensors_do():
    state, result = trained(*problem())
    other, other_result = trained(*problem(), data=TensorDataset(*data()))
    assert other_result == result
    assert_same(other, state)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left, right):
        return self.linear(left * right)


def test_a_tuple_of_inputs_reaches_the_network_as_its_arguments():
    x, y = data()
    inputs = (x, x.flip(0))

    def make():
        torch.manual_seed(1)
        model = SupervisedModel(BayesianModule(TwoInputs()), likelihoods.Categorical(num_data=ROWS))
        return model, AutoRadial(model)

    state, result = trained(*make(), data=(inputs, y), accumulate=2, validation=(inputs, y))
    items = [((x[i], x.flip(0)[i]), y[i]) for i in range(ROWS)]

    class Items(Dataset):
        def __len__(self):
            return ROWS

        def __getitem__(self, i):
            return items[i]

    other, other_result = trained(*make(), data=Items(), accumulate=2, validation=Items())
    assert other_result == result
    assert_same(other, state)


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
            law = super().observation(f, **noise)
            # Prediction gives draws a dim of their own.
            return law if f.dim() == 2 else dist.Normal(f * float("nan"), 1.0, validate_args=False).to_event(1)

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
