# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A stream is learned task by task, each measured with what is known then."""

import itertools
from dataclasses import replace
from functools import partial

import pyro
import pytest
import torch

from pyro_radial import FitOptions
from pyro_radial.continual import Coreset, PriorChain, Task, TaskStream, train_stream
from tests.helpers.streams import CORESET, MODULE, OPTIONS, ROWS, assert_same, chain, clusters, learn, stream
from tutorials.streams import class_split_stream


def test_several_heads_learn_their_tasks_and_the_others_are_left_alone(fits, monkeypatch):
    distributions = []
    monkeypatch.setattr(
        PriorChain, "advance", partial_after(PriorChain.advance, lambda c, *_: distributions.append(c.prior))
    )
    heads = []
    recorded = partial_after(MODULE.accuracy, lambda *_: heads.append(head_of(one)))
    monkeypatch.setattr(MODULE, "accuracy", recorded)
    one = chain()
    matrix, _ = learn(one, epochs=8)
    # Each task is measured with its own, also when another was learned last.
    assert heads == [0, 0, 1]
    for number, call in enumerate(fits):
        assert call["sites"] == [f"heads.{number}.bias", f"heads.{number}.weight", "trunk.0.weight"]
        assert call["rows"] == call["num_data"] == ROWS
    assert matrix.names == ("classes 0, 1", "classes 2, 3")
    assert matrix.learned.min() == 1.0
    assert matrix.values[0, 1].isnan()
    # The second task has moved the trunk and left the first task's head where it was.
    after_first, after_second = distributions
    assert sorted(after_first) == ["heads.0.bias", "heads.0.weight", "trunk.0.weight"]
    assert torch.equal(after_first["heads.0.weight"].mean, after_second["heads.0.weight"].mean)
    assert not torch.equal(after_first["trunk.0.weight"].mean, after_second["trunk.0.weight"].mean)


def head_of(chain):
    return chain.model.bnn.skeleton.head


def partial_after(function, then):
    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return wrapped


@pytest.mark.parametrize("seed", [0, 2**40])
def test_every_stage_has_a_seed_of_its_own(fits, seed, monkeypatch):
    seeds = []
    monkeypatch.setattr(MODULE.pyro, "set_rng_seed", partial_after(pyro.set_rng_seed, seeds.append))
    train_stream(chain(), stream(), coreset=CORESET, **{**OPTIONS, "seed": seed})
    # A task, its coreset and a prediction; a task, two coresets and two predictions.
    own = list(dict.fromkeys(seeds))
    assert len(own) == len(set(own)) == 3 + 5
    assert all(0 <= s < 2**32 for s in own)
    # Epochs count on from the seed of a fit, so neighbors would share their order of rows.
    ordered = sorted(call["seed"] for call in fits)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > OPTIONS["epochs"]


def test_the_coreset_of_each_head_is_learned_just_before_its_prediction(fits):
    one = chain()
    learn(one, coreset=CORESET)
    assert [(call["rows"], call["epochs"]) for call in fits] == [
        *[(ROWS - 6, 2), (6, 1)],
        *[(ROWS - 6, 2), (6, 1), (6, 1)],
    ]
    assert [call["sites"][0] for call in fits] == [f"heads.{head}.bias" for head in (0, 0, 1, 0, 1)]
    assert all(call["num_data"] == call["rows"] for call in fits)
    # That of the last task, not of the last coreset.
    assert one.likelihood.num_data == ROWS - 6


def test_the_coreset_is_used_for_the_prediction():
    tasks = stream()
    x, y = tasks[0].train
    kept = torch.arange(6)
    relabeled = y.clone()
    relabeled[kept] = 1 - y[kept]
    first = Task("first", (x, relabeled), (x[kept], relabeled[kept]))
    one = TaskStream.of([first], num_outputs=2)
    accuracies = []
    for options in ({"optim": partial(torch.optim.Adam, lr=1e-6)}, {"epochs": 30}):
        matrix, _ = learn(chain(form="exact"), one, coreset=Coreset(6, lambda x, size, seed: kept, options), epochs=8)
        accuracies.append(float(matrix.values[0, 0]))
    assert accuracies[0] < 0.5
    assert accuracies[1] == 1.0


def test_few_rows_have_smaller_batches_until_a_task_has_enough_steps(fits):
    tasks = class_split_stream(clusters(2 * 512, 0), clusters(16, 1), classes_per_task=2)
    # Of 512 rows for a task: 4 steps of 256 rows in two epochs, 8 of 128, 16 of 64, 32 of 32.
    learn(tasks=tasks, epochs=2, batch_size=256, fewest_steps=9)
    assert [call["batch_size"] for call in fits] == [64, 64]
    fits.clear()
    learn(tasks=tasks, epochs=2, batch_size=256, fewest_steps=None)
    learn(tasks=tasks, epochs=2, batch_size=256, fewest_steps=4)
    learn(tasks=tasks, epochs=2, batch_size=40, fewest_steps=20)
    assert [call["batch_size"] for call in fits] == [256, 256, 256, 256, 40, 40]
    fits.clear()
    with pytest.warns(UserWarning, match=r"task 'classes 0, 1' has 32 steps in batches of 32, and needs 33"):
        learn(tasks=tasks[:1], epochs=2, batch_size=256, fewest_steps=33)
    assert [call["batch_size"] for call in fits] == [32]
    with pytest.raises(ValueError, match="fewest_steps must be"):
        learn(fewest_steps=0)


BAD = {
    "validation": ({"validation": clusters(8, 0)}, r"fit_options must leave .* got \['validation'\]"),
    "coreset's seed": ({"coreset": Coreset(2, fit_options={"seed": 1})}, r"coreset must leave .* got \['seed'\]"),
    "coreset's size": ({"coreset": Coreset(ROWS)}, f"less than the {ROWS} rows of task 'classes 0, 1', got {ROWS}"),
    "no validation": ({"measure_on": "validation"}, "task 'classes 0, 1' must have validation data"),
    "patience": ({"patience": 2}, "validation must be given with patience"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused_before_training(options, message):
    one = chain()
    with pytest.raises(ValueError, match=message):
        learn(one, **options)
    assert one.prior == {}


def test_a_network_without_the_head_of_a_task_is_refused_by_the_task_s_name():
    with pytest.raises(ValueError, match=r"task 'classes 2, 3' uses head 1: .*MultiHead"):
        learn(chain(multi_head=False))
    tasks = class_split_stream(clusters(2 * ROWS, 0), clusters(16, 1), classes_per_task=1)
    with pytest.raises(ValueError, match=r"task 'classes 2' uses head 2: .*2 heads"):
        learn(tasks=tasks)


def test_what_is_no_chain_of_a_classifier_is_refused():
    for wrong in (chain().model, PriorChain(lambda x, y: None)):
        with pytest.raises(ValueError, match="chain must be a PriorChain around a SupervisedModel"):
            train_stream(wrong, stream(), **OPTIONS)


def test_a_stream_refuses_a_number_that_is_not_its_tasks():
    one, tasks = chain(), stream()
    one.likelihood.num_data = 7
    name, rows = tasks.names[0], len(tasks[0].train[0])
    with pytest.raises(ValueError, match=f"task '{name}': num_data .* got num_data=7 for {rows} rows"):
        train_stream(one, tasks, epochs=1, progress=False)
    with pytest.raises(ValueError, match=r"must leave out what the stream decides, got \['num_data'\]"):
        train_stream(one, tasks, epochs=1, progress=False, options=FitOptions(num_data=rows))


def test_forward_transfer_is_measured_on_the_next_task_and_on_the_prior():
    (x, y), test = clusters(ROWS, 0), clusters(16, 1)
    shifted = test[0], (test[1] + 1) % 4
    tasks = [
        Task("one", (x, y), test),
        # The first has all that these need, or none of it.
        Task("the same", (x, y), test),
        Task("another", (x, (y + 1) % 4), shifted),
    ]
    matrix, state = learn(
        chain(multi_head=False), TaskStream.of(tasks, num_outputs=4), epochs=10, forward_transfer=True
    )
    plain = learn(chain(multi_head=False), TaskStream.of(tasks, num_outputs=4), epochs=10)
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
