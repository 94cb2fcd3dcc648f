# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A stream that takes more tasks ends as one that had them from the start; the chain knows what was kept."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from pyro_radial import BayesianModule, SupervisedModel
from pyro_radial.continual import Coreset, PriorChain, Task, TaskStream
from pyro_radial.continual.coresets import KeptRows
from pyro_radial.infer.training.checkpoint import copy_state
from pyro_radial.nn import MultiHead, likelihoods
from tests.helpers.runs import assert_same as assert_same_state
from tests.helpers.streams import CORESET, MODULE, ROWS, assert_same, chain, clusters, killed, learn, stream
from tutorials.streams import class_split_stream, permuted_stream

ONE_HEAD = partial(chain, multi_head=False, form="normal")
FUNCTIONS = Coreset(6, use="functions", max_points=4)


def with_four_heads():
    torch.manual_seed(1)
    net = MultiHead(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), [nn.Linear(5, 2) for _ in range(4)])
    return PriorChain(SupervisedModel(BayesianModule(net), likelihoods.Categorical()))


def four_permutations():
    return permuted_stream(clusters(ROWS, 0), clusters(16, 1), 4)


def four_pairs():
    """Two classes a task, each pair under a head of its own."""
    train = torch.randn(4 * ROWS, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4 * ROWS) % 8
    return class_split_stream(train, train)


#: A chain, four tasks, and what is kept.
STREAMS = {
    "one head, nothing kept": (ONE_HEAD, four_permutations, None),
    "one head, labels": (ONE_HEAD, four_permutations, CORESET),
    "one head, functions": (ONE_HEAD, four_permutations, FUNCTIONS),
    "four heads, labels": (with_four_heads, four_pairs, Coreset(4, fit_options={"epochs": 1})),
    "four heads, functions": (with_four_heads, four_pairs, FUNCTIONS),
    "four heads, functions at current inputs": (
        with_four_heads,
        four_pairs,
        Coreset(6, use="functions", inputs="current"),
    ),
}


@pytest.fixture(params=STREAMS.values(), ids=STREAMS.keys())
def setting(request):
    return request.param


def test_a_saved_chain_goes_on_with_more_tasks_as_one_run_does(setting, tmp_path):
    make, tasks, coreset = setting
    whole = learn(make(), tasks(), coreset=coreset)
    one = make()
    matrix, _ = learn(one, tasks()[:1], coreset=coreset)
    torch.save(one.state_dict(), tmp_path / "chain.pt")
    # In another process, with nothing but the file, the tasks and the matrix. It grows twice.
    other = make()
    other.load_state_dict(torch.load(tmp_path / "chain.pt", weights_only=True))
    matrix, _ = learn(other, tasks()[:3], coreset=coreset, after=matrix)
    assert matrix.names == tasks().names[:3]
    assert_same(learn(copy.deepcopy(other), tasks(), coreset=coreset, after=matrix), whole)


def test_a_finished_checkpoint_goes_on_with_more_tasks_as_one_run_does(setting, tmp_path, monkeypatch):
    make, tasks, coreset = setting
    options = {"coreset": coreset, "forward_transfer": True}
    whole = learn(make(), tasks(), **options)
    options["checkpoint"] = tmp_path
    learn(make(), tasks()[:2], **options)
    # A run that grows can be killed too.
    killed(monkeypatch, make(), MODULE, "fit", 1, "before", tasks=tasks(), **options)
    matrix, state = learn(make(), tasks(), **options)
    assert_same((matrix, state), whole)
    assert torch.equal(matrix.baseline.nan_to_num(-1.0), whole[0].baseline.nan_to_num(-1.0))
    assert [file.name for file in tmp_path.iterdir()] == ["stream.pt"]


def test_a_run_after_a_matrix_can_be_killed(tmp_path, monkeypatch):
    whole = learn(ONE_HEAD(), four_permutations(), coreset=FUNCTIONS)
    one = ONE_HEAD()
    matrix, _ = learn(one, four_permutations()[:2], coreset=FUNCTIONS)
    options = {"tasks": four_permutations(), "coreset": FUNCTIONS, "after": matrix, "checkpoint": tmp_path}
    killed(monkeypatch, copy.deepcopy(one), MODULE, "fit", 2, "after", **options)
    assert_same(learn(copy.deepcopy(one), **options), whole)


def test_whoever_goes_on_needs_no_rows_that_earlier_tasks_were_learned_from():
    one = ONE_HEAD()
    tasks = list(four_permutations())
    whole = learn(ONE_HEAD(), TaskStream.of(tasks, num_outputs=4), coreset=FUNCTIONS)
    matrix, _ = learn(one, TaskStream.of(tasks[:3], num_outputs=4), coreset=FUNCTIONS)
    forgotten = [replace(task, train=(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))) for task in tasks[:3]]
    grown = TaskStream.of([*forgotten, tasks[3]], num_outputs=4)
    assert_same(learn(one, grown, coreset=FUNCTIONS, after=matrix), whole)


class TestKept:
    """The rows that a chain keeps are part of its state."""

    def test_they_are_in_the_state_dict_and_only_there_if_something_is_kept(self):
        one = ONE_HEAD()
        learn(one, four_permutations()[:2], coreset=FUNCTIONS)
        names = [name for name in one.state_dict() if name.startswith("kept.")]
        assert names == [f"kept.{task}.{name}" for task in (0, 1) for name in ("head", "x", "y")]
        assert one.state_dict()["kept.1.x"].shape == (6, 4)
        assert not any(name.startswith("kept.") for name in one.model_state())
        other = ONE_HEAD()
        learn(other, four_permutations()[:2])
        assert not any(name.startswith("kept.") for name in other.state_dict())

    def test_labels_are_kept_for_replay_alone(self):
        x, y = stream()[0].train
        for coreset in (CORESET, FUNCTIONS):
            one = chain(form="normal")
            learn(one, stream()[:1], coreset=coreset)
            (kept,) = one.kept.tasks
            index = [int((x == row).all(1).nonzero()) for row in kept.x]
            assert len(set(index)) == 6
            assert kept.y.tolist() == (y[index].tolist() if coreset is CORESET else [])

    def test_loading_replaces_all_that_was_kept(self):
        one = ONE_HEAD()
        learn(one, four_permutations()[:3], coreset=FUNCTIONS)
        state = copy_state(one.state_dict())
        for tasks in (0, 1):
            other = ONE_HEAD()
            if tasks:
                learn(other, four_permutations()[1:], coreset=Coreset(5))
            # Files may have their entries in any order.
            other.load_state_dict(dict(reversed(state.items())))
            assert_same_state(dict(sorted(other.state_dict().items())), dict(sorted(state.items())))
        fewer = {name: value for name, value in state.items() if not name.startswith(("kept.1.", "kept.2."))}
        one.load_state_dict(fewer)
        assert_same_state(one.state_dict(), fewer)

    def test_more_than_ten_tasks_stay_in_their_order(self):
        rows = KeptRows()
        for number in range(12):
            rows.append(MODULE.keep(Coreset(number + 1, use="functions"), numbered(number), 0)[0])
        other = KeptRows()
        other.load_state_dict(dict(sorted(rows.state_dict().items())))
        assert [kept.x[:, 0].tolist() for kept in other.tasks] == [[float(n)] * (n + 1) for n in range(12)]

    def test_they_follow_the_chain(self):
        one = ONE_HEAD()
        learn(one, four_permutations()[:1], coreset=FUNCTIONS)
        assert one.double().kept.tasks[0].x.dtype == torch.float64
        assert one.to("meta").kept.tasks[0].x.device.type == "meta"

    def test_they_are_copies_without_a_graph(self):
        inputs = torch.zeros(6, 4, requires_grad=True)
        one = ONE_HEAD()
        coreset = Coreset(6, lambda x, size, seed: inputs, use="functions")
        learn(one, four_permutations()[:1], coreset=coreset)
        with torch.no_grad():
            inputs += 1.0
        assert copy.deepcopy(one).kept.tasks[0].x.equal(torch.zeros(6, 4))


def numbered(number):
    x = torch.full((20, 1), float(number))
    y = torch.zeros(20, dtype=torch.long)
    return Task(str(number), (x, y), (x, y))


def test_forward_transfer_is_measured_on_the_next_task_and_on_the_prior():
    (x, y), test = clusters(ROWS, 0), clusters(16, 1)
    moved = test[0], (test[1] + 1) % 4
    tasks = [
        Task("one", (x, y), test),
        # The first has all that these need, or none of it.
        Task("the same", (x, y), test),
        Task("another", (x, (y + 1) % 4), moved),
    ]
    matrix, state = learn(ONE_HEAD(), TaskStream.of(tasks, num_outputs=4), epochs=10, forward_transfer=True)
    plain = learn(ONE_HEAD(), TaskStream.of(tasks, num_outputs=4), epochs=10)
    above = [[False, True, False], [False, False, True], [False, False, False]]
    unmeasured = [[False, False, True], [False, False, False], [False, False, False]]
    assert matrix.values.isnan().tolist() == unmeasured
    assert matrix.values[0, 1] == 1.0
    assert matrix.values[1, 2] == 0.0
    assert matrix.baseline.isnan().tolist() == [True, False, False]
    # Draws of the prior know nothing: the share of four classes that they hit is about a quarter.
    assert matrix.baseline[1:].max() < 0.8
    assert matrix.forward_transfer == pytest.approx((1.0 - float(matrix.baseline[1:].sum())) / 2)
    # Nothing else changes.
    below = matrix.values.masked_fill(torch.tensor(above), float("nan"))
    assert_same((replace(matrix, values=below), state), plain)


def test_forward_transfer_needs_to_be_measured():
    matrix, _ = learn()
    with pytest.raises(
        ValueError, match=r"task 'classes 2, 3' before it was learned, got NaN; train_stream\(\.\.\., fo"
    ):
        _ = matrix.forward_transfer


# ------------------------------------------------------------------------------------------------ refused


def learned(coreset=None, number=2):
    one = ONE_HEAD()
    return one, learn(one, four_permutations()[:number], coreset=coreset)[0]


def renamed(number):
    tasks = list(four_permutations())
    tasks[number] = replace(tasks[number], name="new")
    return TaskStream.of(tasks, num_outputs=4)


OTHER_TASKS = {
    "fewer": (lambda: four_permutations()[:1], "task 1 must be 'permutation 2', got None"),
    "another name": (lambda: renamed(1), "task 1 must be 'permutation 2', got 'new'"),
    "the new ones alone": (lambda: four_permutations()[2:], "task 0 must be 'permutation 1', got 'permutation 3'"),
}


@pytest.mark.parametrize(("tasks", "message"), OTHER_TASKS.values(), ids=OTHER_TASKS.keys())
def test_a_stream_without_the_tasks_that_were_learned_is_refused(tasks, message, tmp_path):
    one, matrix = learned()
    with pytest.raises(ValueError, match=f"stream must begin with the tasks of after: {message}"):
        learn(one, tasks(), after=matrix)
    learn(ONE_HEAD(), four_permutations()[:2], checkpoint=tmp_path)
    made = r"\['permutation 1', 'permutation 2'\]"
    with pytest.raises(ValueError, match=rf"stream\.pt was made with tasks={made}, this run has tasks=\["):
        learn(ONE_HEAD(), tasks(), checkpoint=tmp_path)


def test_other_data_of_a_task_that_was_learned_are_refused(tmp_path):
    learn(ONE_HEAD(), four_permutations()[:2], checkpoint=tmp_path)
    tasks = list(four_permutations())
    tasks[1] = replace(tasks[1], train=tasks[2].train)
    with pytest.raises(ValueError, match=r"stream\.pt was made with permutation 2\.train\.x="):
        learn(ONE_HEAD(), TaskStream.of(tasks, num_outputs=4), checkpoint=tmp_path)


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
    "inputs for none": (None, FUNCTIONS, "must keep nothing, as the chain does of task 'permutation 1', got inputs"),
    "current for kept": (FUNCTIONS, CURRENT, "must keep inputs, as the chain does of task '.* 1', got the head alone"),
}


@pytest.mark.parametrize(("before", "now", "message"), OTHER_CORESETS.values(), ids=OTHER_CORESETS.keys())
def test_another_coreset_than_the_chain_s_is_refused_by_the_task(before, now, message, tmp_path):
    one, matrix = learned(before)
    with pytest.raises(ValueError, match=f"coreset {message}"):
        learn(one, four_permutations(), coreset=now, after=matrix)
    learn(ONE_HEAD(), four_permutations()[:2], coreset=before, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"stream\.pt was made with coreset"):
        learn(ONE_HEAD(), four_permutations(), coreset=now, checkpoint=tmp_path)


def test_a_chain_that_keeps_rows_begins_no_other_stream():
    one, matrix = learned(FUNCTIONS)
    before = copy_state(one.state_dict())
    with pytest.raises(
        ValueError, match="after must be the matrix of the 2 tasks of which the chain keeps inputs, got"
    ):
        learn(one, four_permutations(), coreset=FUNCTIONS)
    first = replace(matrix, values=matrix.values[:1, :1], names=matrix.names[:1])
    with pytest.raises(
        ValueError, match=r"after must be the matrix of the 2 tasks .* got one of 1 tasks; for other tasks"
    ):
        learn(one, four_permutations(), coreset=FUNCTIONS, after=first)
    assert_same_state(one.state_dict(), before)


def test_a_matrix_of_tasks_that_were_not_learned_is_refused():
    one, matrix = learned()
    with pytest.raises(
        ValueError, match="chain must have learned the tasks of after, got a chain that has learned not"
    ):
        learn(ONE_HEAD(), four_permutations(), after=matrix)
    with pytest.raises(
        ValueError, match="after must have all accuracies after its last task, 'permutation 4', got NaN"
    ):
        learn(one, four_permutations(), after=matrix.with_more_tasks(four_permutations().names))


def last(task, num_outputs=4, num_heads=1):
    return TaskStream.of([*four_permutations()[:2], task], num_outputs=num_outputs, num_heads=num_heads)


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
    "inputs to measure": (
        lambda: last(Task("new", (X, Y), (X[:, :3], Y))),
        r"task 'new' cannot be predicted: the network of bnn.* given x of shape \[1, 3\]",
    ),
    "outputs": (
        lambda: last(Task("new", (X, Y), (X, Y)), num_outputs=5),
        "task 'new': the network of chain must have the num_outputs of stream, 5, got 4",
    ),
    "a head": (
        lambda: last(Task("new", (X, Y), (X, Y), head=1), num_heads=2),
        "task 'new' uses head 1, but model must hold a MultiHead",
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
        learn(wider, four_permutations(), after=matrix)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*prior of site '0\.weight'"):
        with_four_heads().load_state_dict({**with_four_heads().state_dict(), **priors})
