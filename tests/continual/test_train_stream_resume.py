# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A killed run over a stream ends as an undisturbed one, and no other run takes it up."""

import os
import signal
from dataclasses import replace
from functools import partial

import pyro.distributions as dist
import pytest
import torch

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.continual import (
    Coreset,
    PriorChain,
    TaskStream,
)
from pyro_radial.continual.coresets import random_coreset
from pyro_radial.infer.autoguide import AutoMeanField
from pyro_radial.infer.training.checkpoint import Checkpoint, copy_state
from pyro_radial.infer.training.training_run import TrainingRun
from tests.helpers.runs import Counting
from tests.helpers.runs import assert_same as assert_same_state
from tests.helpers.streams import CORESET, MODULE, assert_same, chain, killed, learn, stream

STAGES = [
    # Of a fit: the coreset of the first task, and the second task.
    *[(MODULE, "fit", at, "after") for at in (2, 3)],
    *[(TrainingRun, "step", at, "before") for at in (1, 5, 11)],
    (PriorChain, "advance", 1, "after"),
    (MODULE, "accuracy", 3, "after"),
    # Between the two tasks, and after the last.
    *[(MODULE._StreamRun, name, at, "before") for at in (2, 3) for name in ("save", "_remove_task_files")],
]


@pytest.fixture(scope="module")
def undisturbed():
    torch.set_num_threads(1)  # As in every test, which this may run before.
    return learn(coreset=CORESET)


@pytest.mark.parametrize("where", STAGES, ids=lambda where: "-".join(map(str, where[1:])))
def test_a_killed_run_ends_as_an_undisturbed_one(where, undisturbed, monkeypatch, tmp_path):
    options = {"coreset": CORESET, "checkpoint": tmp_path}
    one = chain()
    killed(monkeypatch, one, *where, **options)
    left = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert_same(learn(**options), undisturbed)
    assert [file.name for file in tmp_path.iterdir()] == ["stream.pt"]
    # The same, with the chain that the killed run has left half-way.
    for name, content in left.items():
        (tmp_path / name).write_bytes(content)
    if "stream.pt" in left:
        assert_same(learn(one, **options), undisturbed)


def test_no_loss_of_ones_own_with_a_checkpoint(undisturbed, tmp_path):
    assert_same(learn(coreset=CORESET, checkpoint=tmp_path, loss=None), undisturbed)


@pytest.mark.parametrize("option", ["loss", "callback", "scheduler"])
def test_a_run_with_a_checkpoint_takes_none_for_the_default(option, tmp_path):
    assert_same(learn(checkpoint=tmp_path, **{option: None}), learn())


def test_a_finished_run_only_reads(undisturbed, monkeypatch, tmp_path):
    options = {"coreset": CORESET, "checkpoint": tmp_path}
    learn(**options)
    monkeypatch.setattr(MODULE, "fit", None)
    monkeypatch.setattr(MODULE, "predict", None)
    assert_same(learn(**options), undisturbed)


@pytest.mark.parametrize("where", [STAGES[0], STAGES[3], STAGES[-3]], ids=lambda where: "-".join(map(str, where[1:])))
def test_what_a_loss_keeps_from_task_to_task_resumes_too(where, monkeypatch, tmp_path):
    def options():
        return {"loss": TermsELBO(kl_weight=Counting()), "coreset": CORESET}

    expected = learn(**options())
    killed(monkeypatch, None, *where, checkpoint=tmp_path, **options())
    assert_same(learn(checkpoint=tmp_path, **options()), expected)


def test_a_process_that_was_killed_is_continued_by_another(tmp_path):
    parent = os.getpid()

    def callback(record):
        if os.getpid() != parent and (tmp_path / "task-1.pt").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            learn(checkpoint=tmp_path, epochs=3, callback=callback)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        # What is left of locks says nothing now.
        ".stream.pt.lock",
        ".task-1.pt.lock",
        "stream.pt",
        "task-1.pt",
    ]
    assert_same(learn(checkpoint=tmp_path, epochs=3, callback=callback), learn(epochs=3, callback=callback))


def renamed():
    """The stream with another name of its second task."""
    whole = stream(validation_fraction=0.25)
    tasks = [whole[0], replace(whole[1], name="another")]
    return TaskStream.of(tasks, num_outputs=whole.num_outputs, num_heads=whole.num_heads)


def other_settings():
    return {
        "seed": {"seed": 4},
        "num_samples": {"num_samples": 4},
        "measure_on": {"measure_on": "validation"},
        "coreset": {"coreset": CORESET},
        "guide": {"guide": lambda c: c.guide(AutoMeanField)},
        "tasks": {"tasks": renamed()},
        "form": {"one": chain(form="exact")},
        "weight": {"one": chain(weight=2.0)},
        "epochs": {"epochs": 3},
        "learning rate": {"optim": partial(torch.optim.Adam, lr=0.2)},
        "loss": {"loss": TermsELBO(kl_weight=0.5)},
    }


@pytest.mark.parametrize("setting", other_settings())
def test_other_settings_are_refused_in_the_first_task_and_after_it(setting, monkeypatch, tmp_path):
    tasks = stream(validation_fraction=0.25)
    options = {"tasks": tasks, "loss": TermsELBO(kl_weight=1.0), "checkpoint": tmp_path}
    killed(monkeypatch, None, MODULE, "fit", 1, "after", **options)
    changed = {**options, **other_settings()[setting]}
    one = changed.pop("one", None) or chain()
    before = copy_state(one.state_dict())
    with pytest.raises(ValueError, match=r"stream\.pt was made with"):
        learn(one, **changed)
    assert_same_state(one.state_dict(), before)


def relabeled(number):
    """The stream with one other label among those that a task learns from."""
    whole = stream()
    tasks = list(whole)
    x, y = tasks[number].train
    tasks[number] = replace(tasks[number], train=(x, y.index_fill(0, torch.tensor([3]), 1 - int(y[3]))))
    return TaskStream.of(tasks, num_outputs=whole.num_outputs, num_heads=whole.num_heads)


def drawn_with_seed(x, size, *, seed=0):
    return random_coreset(x, size, seed=seed + 1)


@pytest.mark.parametrize("number", [0, 1])
def test_other_data_of_a_task_that_was_learned_is_refused(number, tmp_path):
    learn(checkpoint=tmp_path)
    learn(checkpoint=tmp_path)
    one = chain()
    before = copy_state(one.state_dict())
    with pytest.raises(ValueError, match=rf"stream\.pt was made with {stream().names[number]}\.train\.y="):
        learn(one, tasks=relabeled(number), checkpoint=tmp_path)
    assert_same_state(one.state_dict(), before)


def guide_of(kind, one):
    return one.guide(kind)


def test_functions_of_a_guide_and_of_a_coreset_are_told_apart_by_their_names_and_arguments(tmp_path):
    options = {"guide": partial(guide_of, AutoRadial), "coreset": Coreset(6, choose=drawn_with_seed)}
    learn(checkpoint=tmp_path, **options)
    learn(checkpoint=tmp_path, **options)
    with pytest.raises(ValueError, match=r"stream\.pt was made with guide\.args\.0='AutoRadial', .*='AutoMeanField'"):
        learn(checkpoint=tmp_path, **{**options, "guide": partial(guide_of, AutoMeanField)})
    with pytest.raises(ValueError, match=r"stream\.pt was made with coreset\.choose='drawn_with_seed', .*="):
        learn(checkpoint=tmp_path, **{**options, "coreset": Coreset(6)})


def with_another_prior():
    one = chain()
    model = SupervisedModel(BayesianModule(one.model.bnn.skeleton, dist.Normal(0.0, 2.0)), one.model.likelihood)
    return PriorChain(model)


def test_another_prior_of_the_model_is_refused(tmp_path):
    learn(checkpoint=tmp_path)
    learn(checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"stream\.pt was made with model\.prior\.scale='.* of 1\.0', .* of 2\.0'"):
        learn(with_another_prior(), checkpoint=tmp_path)


def test_another_model_is_refused(tmp_path):
    learn(checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"stream\.pt is from another model.*bnn\.net\.trunk\.1"):
        learn(chain(width=6), checkpoint=tmp_path)


def test_files_that_are_none_of_a_run(tmp_path):
    (tmp_path / "stream.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"stream\.pt is damaged or not a checkpoint"):
        learn(checkpoint=tmp_path)
    Checkpoint(tmp_path / "stream.pt").save({})
    with pytest.raises(ValueError, match=r"stream\.pt is not from this version"):
        learn(checkpoint=tmp_path)
    Checkpoint(tmp_path / "stream.pt").save({key: {} for key in MODULE.SAVED})
    with pytest.raises(ValueError, match=r"stream\.pt was made with form=None"):
        learn(checkpoint=tmp_path)
    file = tmp_path / "a file"
    file.touch()
    one = chain()
    with pytest.raises(OSError, match="a file"):
        learn(one, checkpoint=file)
    # Before anything was learned.
    assert one.prior == {}
