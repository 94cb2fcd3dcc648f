# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A killed run ends where an undisturbed one does, and a step is what it claims to be."""

import random
import signal
import subprocess
import sys
from functools import cache, partial

import numpy as np
import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import Dataset, TensorDataset

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods
from tests.infer.runs import (
    FIT,
    ROWS,
    STEPS_PER_EPOCH,
    assert_same,
    data,
    function_problem,
    killed,
    problem,
    state_of,
    trained,
)

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
    "pyro optimizer": (problem, {"optim": pyro.optim.ClippedAdam({"lr": 1e-2, "lrd": 0.99})}),
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
from tests.infer.runs import FIT, data, problem
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


def test_a_schedule_of_the_kl_weight_counts_optimizer_steps_however_batches_are_split():
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


def test_a_pyro_optimizer_trains_as_its_torch_one_does():
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
