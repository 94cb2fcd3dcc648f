# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A killed run ends where an undisturbed one does, and a step is what it claims to be."""

import itertools
import os
import random
import signal
from functools import partial

import numpy as np
import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, MultiStepLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

from pyro_radial import AutoMeanField, AutoRadial, TermsELBO
from pyro_radial.infer.training.checkpoint import copy_state
from tests.helpers.kills import kill_and_resume
from tests.helpers.runs import (
    FIT,
    ROWS,
    STEPS_PER_EPOCH,
    Counting,
    assert_same,
    data,
    described_problem,
    function_problem,
    functional_loss,
    killed,
    problem,
    rates,
    regression,
    state_of,
    targets,
    trained,
    walking_loss,
)

# ------------------------------------------------------------------------------------------------------- resume


def normal_problem():
    """A guide of Pyro's, whose parameters would else begin where those of an earlier one are in the store."""
    pyro.clear_param_store()
    return problem(guide=AutoNormal)


def a_rate(name):
    return {"lr": 0.02 if "scales" in name else 0.01}


# What has a state of its own is combined, so that each part is in a run that is killed: a run ends bit for bit like the
# undisturbed one only if the state of each is kept.
SCENARIOS = {
    "batch norm, validation, schedule with a state": (
        partial(problem, "batch norm"),
        {"validation": data(9, seed=4), "patience": 2, "loss": lambda: TermsELBO(kl_weight=Counting())},
    ),
    "mean field, pyro optimizer, schedule": (
        partial(problem, guide=AutoMeanField),
        {
            "optim": pyro.optim.ClippedAdam({"lr": 1e-2, "lrd": 0.99}),
            "loss": lambda: TermsELBO(kl_weight=lambda step: min(1.0, step / 7)),
        },
    ),
    "dropout, accumulate, two particles": (
        partial(problem, "dropout"),
        {"accumulate": 2, "loss": lambda: TermsELBO(num_particles=2)},
    ),
    "extra state, means first, momentum": (
        described_problem,
        {"validation": data(9, seed=4), "mean_only_epochs": 1, "optim": partial(SGD, lr=1e-3, momentum=0.9)},
    ),
    "model function, milestones": (function_problem, {"scheduler": partial(MultiStepLR, milestones=[1, 2])}),
    "vectorized, scheduled": (
        problem,
        {
            "loss": lambda: TermsELBO(num_particles=3, vectorize_particles=True),
            "scheduler": partial(StepLR, step_size=1, gamma=0.1),
        },
    ),
    "functional, function of the epoch": (
        regression,
        {"loss": functional_loss, "scheduler": lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch))},
    ),
    "walking points": (regression, {"loss": walking_loss, "validation": targets(9)}),
    "plateau": (
        problem,
        {"scheduler": partial(ReduceLROnPlateau, patience=0, threshold=10.0), "validation": data(9, seed=4)},
    ),
    "pyro scheduler": (
        problem,
        {"scheduler": pyro.optim.ExponentialLR({"optimizer": SGD, "optim_args": {"lr": 1e-3}, "gamma": 0.1})},
    ),
    "rates of a guide of Pyro's": (normal_problem, {"optim": pyro.optim.Adagrad(a_rate)}),
    "rates of a model function": (function_problem, {"optim": pyro.optim.Adam(rates)}),
    "rates by name, means first, scheduled by steps": (
        problem,
        {
            "optim": pyro.optim.Adam(rates),
            "mean_only_epochs": 1,
            "scheduler": partial(CosineAnnealingLR, T_max=3 * STEPS_PER_EPOCH),
            "scheduler_interval": "step",
        },
    ),
    "pyro scheduler by name": (
        problem,
        {
            "scheduler": pyro.optim.ExponentialLR({"optimizer": Adam, "optim_args": rates, "gamma": 0.9}),
            "scheduler_interval": "step",
        },
    ),
}
# (method, call, when): inside a step, between steps, between the last step of an epoch and its end, between epochs.
KILLS = [("gradients", 3, "after"), ("step", 7, "after"), ("end_epoch", 1, "before"), ("end_epoch", 2, "after")]
CASES = list(zip(SCENARIOS, itertools.cycle(KILLS), strict=False))


def run(kind, **kwargs):
    make, settings = SCENARIOS[kind]
    model, guide = make()
    if make is regression:
        kwargs.setdefault("data", targets())
    fresh = {"loss": settings["loss"]()} if "loss" in settings else {}
    torch.manual_seed(8)
    return trained(model, guide, **{**settings, **fresh, **kwargs})


@pytest.mark.parametrize(("kind", "moment"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_a_killed_run_ends_bit_for_bit_where_an_undisturbed_one_does(kind, moment, tmp_path, monkeypatch):
    state, result = run(kind)
    assert len(result.history) == FIT["epochs"] or result.stopped_early
    kept = {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1 if moment[0] == "end_epoch" else 2}
    with killed(monkeypatch, *moment):
        run(kind, **kept)
    resumed_state, resumed = run(kind, **kept)
    assert resumed == result
    assert_same(resumed_state, state)


def test_a_run_killed_after_every_step_and_without_a_seed_still_ends_where_an_undisturbed_one_does(
    tmp_path, monkeypatch
):
    settings = {"seed": None, "epochs": 2}
    torch.manual_seed(8)
    pair = problem("dropout")
    torch.manual_seed(8)
    state, result = trained(*pair, **settings)
    settings |= {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1}
    for seed in range(8, 8 + 2 * STEPS_PER_EPOCH):
        pair = problem("dropout")
        # Only the first run draws its order of rows and its noise from this seed.
        torch.manual_seed(seed)
        with killed(monkeypatch, "save", 2, "before"):
            trained(*pair, **settings)
    resumed_state, resumed = trained(*problem("dropout"), **settings)
    assert resumed == result
    assert_same(resumed_state, state)


def test_a_process_killed_by_sigkill_while_it_writes_resumes_bit_for_bit(tmp_path):
    path, original = tmp_path / "run.pt", torch.save

    def save(state, file):
        if state["epoch"] == 1 and state["step_in_epoch"] == 3:
            file.write(b"half a file")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        original(state, file)

    child = os.fork()
    if child == 0:
        torch.save = save
        try:
            trained(*problem("dropout"), checkpoint=path, checkpoint_every=1)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    saved = torch.load(path, weights_only=True)
    assert (saved["epoch"], saved["step_in_epoch"]) == (1, 2)
    state, result = trained(*problem("dropout"))
    resumed_state, resumed = trained(*problem("dropout"), checkpoint=path, checkpoint_every=1)
    assert resumed == result
    assert_same(resumed_state, state)


# The soak has all kinds. A stream is killed in test_train_stream_resume.py.
@pytest.mark.parametrize("kind", ["functional with walking points", "scheduled"])
def test_a_process_killed_at_a_random_moment_is_continued_by_another(kind):
    assert kill_and_resume(kind, 1) == (1, 1)


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


def test_a_run_that_patience_stopped_goes_on_with_a_longer_one(tmp_path):
    settings = {"validation": data(9, seed=4), "optim": partial(SGD, lr=0.1), "epochs": 12, "batch_size": ROWS}
    expected_state, expected = trained(*problem(), patience=4, **settings)
    settings["checkpoint"] = tmp_path / "run.pt"
    _, short = trained(*problem(), patience=1, **settings)
    assert short.stopped_early
    assert len(short.history) < len(expected.history)
    state, result = trained(*problem(), patience=4, **settings)
    assert result == expected
    assert_same(state, expected_state)


@pytest.mark.parametrize("kind", ["vectorized, scheduled", "functional, function of the epoch"])
def test_what_a_loss_draws_at_its_first_call_leaves_the_random_numbers_of_the_steps_alone(kind):
    """The first step's noise is the seed's own, whatever the loss has found out before it."""
    make, settings = SCENARIOS[kind]
    rows = targets() if make is regression else data()
    states = []
    for used in (False, True):
        model, guide = make()
        loss = settings["loss"]()
        guide.setup(*rows)
        if used:
            with torch.no_grad():
                loss(model, guide)(*(part[:6] for part in rows))
        states.append(trained(model, guide, data=rows, loss=loss, epochs=1)[0])
    assert_same(*states)


class FifthCall(Counting):
    """A callback that stops at its fifth call."""

    def __call__(self, record):
        self.calls += 1
        return self.calls == 5

    method = __call__


@pytest.mark.parametrize(("form", "every"), [("object", None), ("method", 3)])
def test_a_run_that_stops_at_its_callbacks_fifth_call_does_so_after_a_resume(form, every, tmp_path, monkeypatch):
    def callback():
        return FifthCall() if form == "object" else FifthCall().method

    settings = {"epochs": 8, "checkpoint_every": every}
    state, result = trained(*problem(), callback=callback(), **settings)
    with killed(monkeypatch, "step", 10, "before"):
        trained(*problem(), callback=callback(), checkpoint=tmp_path / "run.pt", **settings)
    resumed_state, resumed = trained(*problem(), callback=callback(), checkpoint=tmp_path / "run.pt", **settings)
    assert len(resumed.history) == 5
    assert resumed == result
    assert_same(resumed_state, state)
    # It stays stopped.
    assert trained(*problem(), callback=callback(), checkpoint=tmp_path / "run.pt", **settings)[1] == result


def test_a_callback_that_cannot_take_up_the_saved_state_is_refused_and_changes_nothing(tmp_path):
    kept = {"checkpoint": tmp_path / "run.pt"}
    trained(*problem(), epochs=1, callback=FifthCall(), **kept)
    model, guide = problem()
    guide.setup(*data())
    before = copy_state(guide.state_dict())
    with pytest.raises(ValueError, match="callback must have load_state_dict, because its state was saved, got func"):
        trained(model, guide, callback=lambda record: False, **kept)
    assert_same(guide.state_dict(), before)


MOMENTUM = {"lr": 1e-3, "momentum": 0.9, "nesterov": True}
PYRO_AND_TORCH = {
    "optimizer": (
        {"optim": pyro.optim.Adam({"lr": 0.02, "betas": (0.8, 0.9)})},
        {"optim": partial(Adam, lr=0.02, betas=(0.8, 0.9), fused=True)},
    ),
    "momentum after pretraining": (
        {"optim": pyro.optim.SGD(MOMENTUM), "mean_only_epochs": 1},
        {"optim": partial(SGD, **MOMENTUM), "mean_only_epochs": 1},
    ),
    "scheduler": (
        SCENARIOS["pyro scheduler"][1],
        {"optim": partial(SGD, lr=1e-3), "scheduler": partial(ExponentialLR, gamma=0.1)},
    ),
}


@pytest.mark.parametrize("kind", PYRO_AND_TORCH)
def test_what_is_of_pyro_trains_as_its_torch_counterpart_does(kind):
    (state, result), (expected_state, expected) = (trained(*problem(), **settings) for settings in PYRO_AND_TORCH[kind])
    assert result == expected
    assert_same(state, expected_state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": 0.1}, "scheduler must be a function from an optimizer to a torch scheduler.*got float"),
        ({"scheduler": lambda optimizer: 0.1}, "scheduler must be a function.*got one that returns float"),
        ({"scheduler": StepLR(SGD([torch.zeros(1)], lr=1.0), 1)}, "scheduler must be a function.*got StepLR"),
        (
            {"scheduler": SCENARIOS["pyro scheduler"][1]["scheduler"], "optim": partial(SGD, lr=0.1)},
            "optim must be left out with a Pyro scheduler",
        ),
    ],
)
def test_what_is_no_scheduler_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        trained(*problem(), **settings)


def test_optimizer_and_scheduler_go_on_as_they_were_saved(tmp_path):
    """Another learning rate is not used, and a warning says so."""
    settings = {"scheduler": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.1)}
    state, result = trained(*problem(), optim=partial(Adam, lr=0.01), **settings)
    settings["checkpoint"] = tmp_path / "run.pt"
    trained(*problem(), epochs=1, optim=partial(Adam, lr=0.01), **settings)
    words = r"run\.pt was made with learning rates \[0\.01\] and goes on with them, not with \[0\.5\]"
    with pytest.warns(UserWarning, match=words):
        resumed_state, resumed = trained(*problem(), optim=partial(Adam, lr=0.5), **settings)
    assert resumed == result
    assert_same(resumed_state, state)


@pytest.mark.parametrize(
    ("scheduler", "changed", "words"),
    [
        (partial(StepLR, step_size=1, gamma=0.1), {"scheduler": partial(StepLR, step_size=1, gamma=0.2)}, "gamma=0.1"),
        ("cosine", {"epochs": 4}, "T_max=12, this run has scheduler.T_max=16"),
    ],
)
def test_another_schedule_is_refused_by_its_settings(scheduler, changed, words, tmp_path):
    settings = {"checkpoint": tmp_path / "run.pt", "scheduler": scheduler}
    trained(*problem(), **settings)
    with pytest.raises(ValueError, match=rf"made with scheduler\.{words}"):
        trained(*problem(), **{**settings, **changed})


# --------------------------------------------------------------------------------------------- what a step does


def test_one_epoch_equals_the_loop_written_by_hand():
    x, y = data()
    model, guide = problem("batch norm")
    guide.setup(x, y)
    loss = TermsELBO()(model, guide)
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

        _, result = trained(*problem(), loss=TermsELBO(kl_weight=schedule), accumulate=accumulate)
        steps = sorted(set(seen) - {0})
        assert steps == list(range(1, 12))
        assert [record["kl_weight"] for record in result.history] == [0.03, 0.07, 0.11]


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField])
def test_pretraining_moves_means_and_no_scale(guide):
    model, made = problem(guide=guide)
    made.setup(*data())
    before = state_of(model, made)
    state, result = trained(model, made, mean_only_epochs=2, epochs=2)
    for name, value in before.items():
        assert torch.equal(state[name], value) == ("scales" in name), name
    assert [record["kl_weight"] for record in result.history] == [0.0, 0.0]
    moved, _ = trained(*problem(guide=guide), mean_only_epochs=1, epochs=2)
    assert all(not torch.equal(moved[name], before[name]) for name in before)


def test_the_loss_of_pretraining_is_that_of_the_mean_network():
    model, guide = problem()
    x, y = data()
    _, result = trained(model, guide, mean_only_epochs=1, epochs=1, optim=partial(SGD, lr=0.0))
    logits = model.bnn.to_module(guide.median())(x)
    expected = nn.functional.cross_entropy(logits, y).item()
    # Batches are summed in another order than the whole.
    assert result.history[0]["nll"] == pytest.approx(expected, rel=1e-5)
    assert result.history[0]["loss"] == pytest.approx(expected, rel=1e-5)
