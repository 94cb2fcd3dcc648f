# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A stream that was killed, or that takes more tasks, ends as one undisturbed run; no other run takes it up."""

import copy
import itertools
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.continual import Coreset, PriorChain, Task, TaskStream
from pyro_radial.continual.coresets import StoredCoresets, store_coreset
from pyro_radial.continual.prior_chain import model_entries
from pyro_radial.infer.autoguide import AutoMeanField
from pyro_radial.infer.training.checkpoint import Checkpoint, copy_state
from pyro_radial.infer.training.training_run import TrainingRun
from pyro_radial.nn import MultiHead, likelihoods
from tests.helpers.runs import Counting
from tests.helpers.runs import assert_same as assert_same_state
from tests.helpers.streams import CORESET, MODULE, ROWS, assert_same, chain, clusters, killed, learn, stream
from tutorials.streams import class_split_stream, permuted_stream

ONE_HEAD = partial(chain, multi_head=False, form="normal")
FUNCTIONS = Coreset(6, use="functions", max_points=4)
STAGES = [
    # Of a fit: the coreset of the first task, and the second task.
    (MODULE, "fit", 2, "after"),
    (TrainingRun, "step", 5, "before"),
    (TrainingRun, "step", 11, "before"),
    (PriorChain, "advance", 1, "after"),
    (MODULE, "accuracy", 3, "after"),
    # Between the two tasks, and after the last.
    (MODULE._StreamTraining, "save", 2, "before"),
    (Checkpoint, "save", 2, "after"),
    (MODULE._StreamTraining, "save", 3, "after"),
]


def stage_name(where):
    return "-".join(map(str, where[1:])) if isinstance(where, tuple) else str(where)


# ------------------------------------------------------------------------------------------------------- kills


@pytest.fixture(scope="module")
def undisturbed():
    torch.set_num_threads(1)  # As in every test, which this may run before.
    return learn(coreset=CORESET)


@pytest.mark.parametrize(
    ("where", "half_way"), list(zip(STAGES, itertools.cycle([False, True]), strict=False)), ids=stage_name
)
def test_a_killed_run_ends_as_an_undisturbed_one(where, half_way, undisturbed, monkeypatch, tmp_path):
    options = {"coreset": CORESET, "checkpoint": tmp_path}
    half_learned = chain()
    killed(monkeypatch, half_learned, *where, **options)
    # With a new chain, or with the one that the killed run has left half-way.
    assert_same(learn(half_learned if half_way else chain(), **options), undisturbed)
    assert [file.name for file in tmp_path.iterdir()] == ["stream.pt"]


def test_a_finished_run_only_reads(undisturbed, monkeypatch, tmp_path):
    options = {"coreset": CORESET, "checkpoint": tmp_path, "loss": None}
    learn(**options)
    monkeypatch.setattr(MODULE, "fit", None)
    monkeypatch.setattr(MODULE, "predict", None)
    assert_same(learn(**options), undisturbed)


def test_what_a_loss_keeps_from_task_to_task_resumes_too(monkeypatch, tmp_path):
    def options():
        return {"loss": TermsELBO(kl_weight=Counting()), "coreset": CORESET}

    expected = learn(**options())
    killed(monkeypatch, None, *STAGES[2], checkpoint=tmp_path, **options())
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
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stream.pt", "task-1.pt"]
    assert_same(learn(checkpoint=tmp_path, epochs=3, callback=callback), learn(epochs=3, callback=callback))


# ------------------------------------------------------------------------------------------------------- growth


def with_three_heads():
    torch.manual_seed(1)
    net = MultiHead(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), [nn.Linear(5, 2) for _ in range(3)])
    return PriorChain(SupervisedModel(BayesianModule(net), likelihoods.Categorical()))


def permutations(number=3):
    return permuted_stream(clusters(ROWS, 0), clusters(16, 1), number)


def pairs():
    """Two classes a task, each pair under a head of its own."""
    train = torch.randn(3 * ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.arange(3 * ROWS) % 6
    return class_split_stream(train, train)


#: A chain, three tasks, and what is kept.
STREAMS = {
    "one head, labels": (ONE_HEAD, permutations, CORESET),
    "one head, functions": (ONE_HEAD, permutations, FUNCTIONS),
    "heads, labels": (with_three_heads, pairs, Coreset(4, fit_options={"epochs": 1})),
    "heads, functions at current inputs": (with_three_heads, pairs, Coreset(6, use="functions", inputs="current")),
}


@pytest.mark.parametrize("kind", ["one head, labels", "one head, functions", "heads, functions at current inputs"])
def test_a_saved_chain_goes_on_with_more_tasks_as_one_run_does(kind, tmp_path):
    make, tasks, coreset = STREAMS[kind]
    expected = learn(make(), tasks(), coreset=coreset)
    first = make()
    matrix, _ = learn(first, tasks()[:1], coreset=coreset)
    torch.save(first.state_dict(), tmp_path / "chain.pt")
    # In another process, with nothing but the file, the tasks and the matrix. It grows twice.
    second = make()
    second.load_state_dict(torch.load(tmp_path / "chain.pt", weights_only=True))
    matrix, _ = learn(second, tasks()[:2], coreset=coreset, after=matrix)
    assert matrix.names == tasks().names[:2]
    assert_same(learn(second, tasks(), coreset=coreset, after=matrix), expected)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_finished_checkpoint_goes_on_with_more_tasks_as_one_run_does(kind, tmp_path, monkeypatch):
    make, tasks, coreset = STREAMS[kind]
    options = {"coreset": coreset, "forward_transfer": True}
    expected = learn(make(), tasks(), **options)
    options["checkpoint"] = tmp_path
    learn(make(), tasks()[:1], **options)
    # A run that grows can be killed too.
    killed(monkeypatch, make(), MODULE, "fit", 1, "before", tasks=tasks(), **options)
    matrix, state = learn(make(), tasks(), **options)
    assert_same((matrix, state), expected)
    assert torch.equal(matrix.baseline.nan_to_num(-1.0), expected[0].baseline.nan_to_num(-1.0))
    assert [file.name for file in tmp_path.iterdir()] == ["stream.pt"]


def test_a_run_after_a_matrix_can_be_killed_and_needs_no_rows_of_earlier_tasks(tmp_path, monkeypatch):
    tasks = list(permutations())
    expected = learn(ONE_HEAD(), permutations(), coreset=FUNCTIONS)
    first, matrix = learned(FUNCTIONS, 1)
    empty = replace(tasks[0], train=(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)))
    options = {"tasks": TaskStream.of([empty, *tasks[1:]], num_outputs=4), "coreset": FUNCTIONS}
    options |= {"after": matrix, "checkpoint": tmp_path}
    killed(monkeypatch, copy.deepcopy(first), MODULE, "fit", 1, "after", **options)
    assert_same(learn(first, **options), expected)


LEARNED = {}


def learned(coreset=None, number=2):
    """A chain that has learned some tasks, and its matrix."""
    key = id(coreset), number
    if key not in LEARNED:
        one = ONE_HEAD()
        LEARNED[key] = one, learn(one, permutations()[:number], coreset=coreset)[0]
    one, matrix = LEARNED[key]
    return copy.deepcopy(one), matrix


class TestStoredCoresets:
    """What a coreset keeps of each task is part of the chain's state."""

    def test_they_are_in_the_state_dict_and_only_there_if_something_is_kept(self):
        one, _ = learned(FUNCTIONS)
        names = [name for name in one.state_dict() if name.startswith("coresets.")]
        assert names == [f"coresets.{task}.{name}" for task in (0, 1) for name in ("head", "x", "y")]
        assert one.state_dict()["coresets.1.x"].shape == (6, 4)
        assert not any(name.startswith("coresets.") for name in model_entries(one.state_dict()))
        other, _ = learned()
        assert not any(name.startswith("coresets.") for name in other.state_dict())

    def test_labels_are_kept_for_replay_alone(self):
        x, y = stream()[0].train
        for coreset in (CORESET, FUNCTIONS):
            one = chain(form="normal")
            learn(one, stream()[:1], coreset=coreset)
            (stored,) = one.coresets.tasks
            index = [int((x == row).all(1).nonzero()) for row in stored.x]
            assert len(set(index)) == 6
            assert stored.y.tolist() == (y[index].tolist() if coreset is CORESET else [])

    def test_loading_replaces_all_that_was_kept(self):
        one, _ = learned(FUNCTIONS)
        state = copy_state(one.state_dict())
        for tasks in (0, 1):
            other = ONE_HEAD()
            if tasks:
                learn(other, permutations()[:1], coreset=Coreset(5))
            # Files may have their entries in any order.
            other.load_state_dict(dict(reversed(state.items())))
            assert_same_state(dict(sorted(other.state_dict().items())), dict(sorted(state.items())))
        fewer = {name: value for name, value in state.items() if not name.startswith(("coresets.1.", "coresets.2."))}
        one.load_state_dict(fewer)
        assert_same_state(one.state_dict(), fewer)

    def test_more_than_ten_tasks_stay_in_their_order(self):
        rows = StoredCoresets()
        for number in range(12):
            rows.append(store_coreset(Coreset(number + 1, use="functions"), numbered(number), 0)[0])
        other = StoredCoresets()
        other.load_state_dict(dict(sorted(rows.state_dict().items())))
        assert [stored.x[:, 0].tolist() for stored in other.tasks] == [[float(n)] * (n + 1) for n in range(12)]

    def test_they_follow_the_chain(self):
        one, _ = learned(FUNCTIONS, 1)
        assert one.double().coresets.tasks[0].x.dtype == torch.float64
        assert one.to("meta").coresets.tasks[0].x.device.type == "meta"

    def test_they_are_copies_without_a_graph(self):
        inputs = torch.zeros(6, 4, requires_grad=True)
        one = ONE_HEAD()
        coreset = Coreset(6, lambda x, size, seed: inputs, use="functions")
        learn(one, permutations()[:1], coreset=coreset)
        with torch.no_grad():
            inputs += 1.0
        assert copy.deepcopy(one).coresets.tasks[0].x.equal(torch.zeros(6, 4))


def numbered(number):
    x = torch.full((20, 1), float(number))
    y = torch.zeros(20, dtype=torch.long)
    return Task(str(number), (x, y), (x, y))


# ------------------------------------------------------------------------------------------------ refused


def with_another_name():
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
        "tasks": {"tasks": with_another_name()},
        "form": {"one": chain(form="exact")},
        "weight": {"one": chain(weight=2.0)},
        "epochs": {"epochs": 3},
        "loss": {"loss": TermsELBO(kl_weight=0.5)},
    }


@pytest.mark.parametrize("setting", other_settings())
def test_other_settings_are_refused_and_change_nothing(setting, monkeypatch, tmp_path):
    tasks = stream(validation_fraction=0.25)
    options = {"tasks": tasks, "loss": TermsELBO(kl_weight=1.0), "checkpoint": tmp_path}
    killed(monkeypatch, None, MODULE, "fit", 1, "after", **options)
    changed = {**options, **other_settings()[setting]}
    one = changed.pop("one", None) or chain()
    before = copy_state(one.state_dict())
    with pytest.raises(ValueError, match=r"(stream|task-0)\.pt was made with"):
        learn(one, **changed)
    assert_same_state(one.state_dict(), before)


def test_another_model_is_refused(tmp_path):
    learn(checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"stream\.pt is from another model.*bnn\.net\.trunk\.1"):
        learn(chain(width=6), checkpoint=tmp_path)


def test_a_file_that_is_none_of_a_run_is_refused(tmp_path):
    file = tmp_path / "stream.pt"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"stream\.pt is damaged or not a checkpoint"):
        learn(checkpoint=tmp_path)
    Checkpoint(file, "fit 5").save({})
    with pytest.raises(ValueError, match=r"stream\.pt is not from this version"):
        learn(checkpoint=tmp_path)
    one = chain()
    with pytest.raises(OSError, match=r"stream\.pt"):
        learn(one, checkpoint=file)
    # Before anything was learned.
    assert one.prior == {}


def renamed(number):
    tasks = list(permutations())
    tasks[number] = replace(tasks[number], name="new")
    return TaskStream.of(tasks, num_outputs=4)


OTHER_TASKS = {
    "fewer": (lambda: permutations()[:1], "task 1 must be 'permutation 2', got None"),
    "another name": (lambda: renamed(1), "task 1 must be 'permutation 2', got 'new'"),
    "the new ones alone": (lambda: permutations(4)[2:], "task 0 must be 'permutation 1', got 'permutation 3'"),
}


@pytest.mark.parametrize(("tasks", "message"), OTHER_TASKS.values(), ids=OTHER_TASKS.keys())
def test_a_stream_without_the_tasks_that_were_learned_is_refused(tasks, message, tmp_path):
    one, matrix = learned()
    with pytest.raises(ValueError, match=f"stream must begin with the tasks of after: {message}"):
        learn(one, tasks(), after=matrix)
    learn(ONE_HEAD(), permutations()[:2], checkpoint=tmp_path)
    made = r"\('permutation 1', 'permutation 2'\)"
    with pytest.raises(ValueError, match=rf"stream\.pt was made with tasks={made}, this run has tasks=\("):
        learn(ONE_HEAD(), tasks(), checkpoint=tmp_path)


CURRENT = Coreset(6, use="functions", inputs="current")
OTHER_CORESETS = {
    "labels for inputs": (
        FUNCTIONS,
        CORESET,
        "must keep inputs, as the chain does of task '.* 1', got rows with labels",
    ),
    "inputs for labels": (
        CORESET,
        FUNCTIONS,
        "must keep rows with labels, as the chain does of task '.* 1', got inputs",
    ),
    "none for inputs": (FUNCTIONS, None, "must keep inputs, as the chain does of task 'permutation 1', got nothing"),
    "current for kept": (FUNCTIONS, CURRENT, "must keep inputs, as the chain does of task '.* 1', got the head alone"),
}


@pytest.mark.parametrize(("before", "now", "message"), OTHER_CORESETS.values(), ids=OTHER_CORESETS.keys())
def test_another_coreset_than_the_chain_s_is_refused_by_the_task(before, now, message, tmp_path):
    one, matrix = learned(before)
    with pytest.raises(ValueError, match=f"coreset {message}"):
        learn(one, permutations(), coreset=now, after=matrix)
    learn(ONE_HEAD(), permutations()[:2], coreset=before, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"stream\.pt was made with coreset"):
        learn(ONE_HEAD(), permutations(), coreset=now, checkpoint=tmp_path)


def test_a_chain_that_keeps_rows_begins_no_other_stream():
    one, matrix = learned(FUNCTIONS)
    before = copy_state(one.state_dict())
    with pytest.raises(
        ValueError, match="after must be the matrix of the 2 tasks of which the chain keeps inputs, got"
    ):
        learn(one, permutations(), coreset=FUNCTIONS)
    first = replace(matrix, values=matrix.values[:1, :1], names=matrix.names[:1])
    with pytest.raises(
        ValueError, match=r"after must be the matrix of the 2 tasks .* got one of 1 tasks; for other tasks"
    ):
        learn(one, permutations(), coreset=FUNCTIONS, after=first)
    assert_same_state(one.state_dict(), before)


def test_a_matrix_of_tasks_that_were_not_learned_is_refused():
    one, matrix = learned()
    with pytest.raises(
        ValueError, match="chain must have learned the tasks of after, got a chain that has learned not"
    ):
        learn(ONE_HEAD(), permutations(), after=matrix)
    with pytest.raises(
        ValueError, match="after must have all accuracies after its last task, 'permutation 3', got NaN"
    ):
        learn(one, permutations(), after=matrix.with_more_tasks(permutations().names))


def last(task, num_outputs=4, num_heads=1):
    return TaskStream.of([*permutations()[:2], task], num_outputs=num_outputs, num_heads=num_heads)


X, Y = clusters(ROWS, 2)
WRONG = Y.index_fill(0, torch.tensor([7]), 4)
OTHER_DATA = {
    "a class to learn": (
        lambda: last(Task("new", (X, WRONG), (X, Y))),
        r"task 'new': train: y must hold labels from 0 to 3, of 4 classes, for site 'y', got 4 at \[7\]",
    ),
    "a class to measure": (
        lambda: last(Task("new", (X, Y), (X, WRONG))),
        r"task 'new': test: y must hold labels from 0 to 3, of 4 classes, for site 'y', got 4 at \[7\]",
    ),
    "inputs to learn": (
        lambda: last(Task("new", (X[:, :3], Y), (X, Y))),
        r"task 'new' cannot be predicted: the network of bnn.* given x of shape \[1, 3\]",
    ),
    "outputs": (
        lambda: last(Task("new", (X, Y), (X, Y)), num_outputs=5),
        "task 'new': the network of chain must have the num_outputs of stream, 5, got 4",
    ),
    "a head": (
        lambda: last(Task("new", (X, Y), (X, Y), head=1), num_heads=2),
        "task 'new' uses head 1: model must hold a MultiHead",
    ),
}


@pytest.mark.parametrize(("tasks", "message"), OTHER_DATA.values(), ids=OTHER_DATA.keys())
def test_a_task_that_the_network_cannot_have_is_refused_by_its_name(tasks, message, monkeypatch):
    one, matrix = learned()
    before = copy_state(one.state_dict())
    monkeypatch.setattr(MODULE, "fit", None)  # Nothing is trained before it is refused.
    with pytest.raises(ValueError, match=message):
        learn(one, tasks(), after=matrix)
    assert_same_state(one.state_dict(), before)


def test_a_chain_of_another_network_is_refused_by_the_site():
    one, matrix = learned()
    wider = chain(multi_head=False, width=6)
    priors = {name: value for name, value in one.state_dict().items() if name.startswith("chained.")}
    wider.load_state_dict({**wider.state_dict(), **priors})
    with pytest.raises(ValueError, match=r"site '0\.weight' has event shape \(5, 4\), the site's is \(6, 4\)"):
        learn(wider, permutations(), after=matrix)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*prior of site '0\.weight'"):
        with_three_heads().load_state_dict({**with_three_heads().state_dict(), **priors})
