# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyro
import pytest
import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.continual import (
    Coreset,
    PriorChain,
    Task,
    TaskStream,
    k_center_coreset,
    learn_stream,
    permuted,
    split_by_class,
    stream_run,
)
from pyro_radial.infer.autoguide import AutoMeanField
from pyro_radial.infer.training_run import TrainingRun
from pyro_radial.nn import MultiHead, likelihoods

OPTIONS = {
    "epochs": 2,
    "batch_size": 16,
    "optim": partial(torch.optim.Adam, lr=0.1),
    "num_samples": 3,
    "seed": 3,
    "progress": False,
}
ROWS = 24  # of each task to learn from.
HALVES = {"first": slice(ROWS), "second": slice(ROWS, None)}
CORESET = Coreset(6, fit_options={"epochs": 1})


def clusters(rows, seed):
    """Rows around four points, one for each class, so far apart that a linear network tells them."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(rows) % 4
    return 3.0 * torch.eye(4)[y] + 0.3 * torch.randn(rows, 4, generator=generator), y


def stream(multi_head=True, **kwargs):
    return split_by_class(clusters(2 * ROWS, 0), clusters(16, 1), multi_head=multi_head, **kwargs)


def chain(multi_head=True, width=5, **kwargs):
    """A chain around a network with layers that are trained, though not random, and keep statistics."""
    torch.manual_seed(1)
    # A bias before a batch norm is of no effect.
    trunk = nn.Sequential(nn.Linear(4, width, bias=False), nn.BatchNorm1d(width), nn.Tanh())
    net = MultiHead(trunk, [nn.Linear(width, 2) for _ in range(2)]) if multi_head else trunk.append(nn.Linear(width, 4))
    return PriorChain(SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=1)), **kwargs)


def learn(one=None, tasks=None, **options):
    """A run, as what must not differ between two of them: the matrix and the chain."""
    one = chain() if one is None else one
    pyro.set_rng_seed(torch.seed() % 1000)  # What was drawn before does not matter.
    matrix = learn_stream(one, stream() if tasks is None else tasks, **{**OPTIONS, **options})
    return matrix, {name: value.clone() for name, value in one.state_dict().items()}


def assert_same(one, other):
    (matrix, state), (other_matrix, other_state) = one, other
    assert torch.equal(matrix.values.nan_to_num(-1.0), other_matrix.values.nan_to_num(-1.0))
    if matrix.baseline is not None:
        assert torch.equal(matrix.baseline, other_matrix.baseline)
    assert list(state) == list(other_state)
    for name, value in state.items():
        assert torch.equal(value, other_state[name]), name


@pytest.fixture
def fits(monkeypatch):
    """The calls of ``fit``: sites, rows, seed, and what the likelihood took for their number."""
    calls = []

    def recorded(chain, guide, data, **options):
        result = fit(chain, guide, data, **options)
        calls.append(
            {
                "sites": sorted(guide.posterior()),
                "rows": len(data[0]),
                "num_data": chain.likelihood.num_data,
                "seed": options["seed"],
                "epochs": options["epochs"],
            }
        )
        return result

    fit = stream_run.fit
    monkeypatch.setattr(stream_run, "fit", recorded)
    return calls


class Killed(BaseException):
    """No error that anything would catch."""


def kill(patch, owner, name, at, when):
    """The ``at``-th call, from one, of a function is the last, before or after it has done its work."""
    original, count = getattr(owner, name), 0

    def interrupted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at and when == "before":
            raise Killed
        result = original(*args, **kwargs)
        if count == at:
            raise Killed
        return result

    patch.setattr(owner, name, interrupted)


def killed(monkeypatch, one, *where, **options):
    with monkeypatch.context() as patch:
        kill(patch, *where)
        with pytest.raises(Killed):
            learn(one, **options)


# What is learned


def test_several_heads_learn_their_tasks_and_the_others_are_left_alone(fits, monkeypatch):
    distributions = []
    monkeypatch.setattr(
        PriorChain, "advance", partial_after(PriorChain.advance, lambda c, *_: distributions.append(c.prior))
    )
    heads = []
    recorded = partial_after(stream_run.predict, lambda c, *_: heads.append(head_of(c)))
    monkeypatch.setattr(stream_run, "predict", recorded)
    one = chain()
    matrix, _ = learn(one, epochs=8)
    # Each task is measured with its own, also when another was learned last.
    assert heads == [0, 0, 1]
    for number, call in enumerate(fits):
        assert call["sites"] == [f"heads.{number}.bias", f"heads.{number}.weight", "trunk.0.weight"]
        assert call["rows"] == call["num_data"] == ROWS
    assert matrix.names == ("classes 0, 1", "classes 2, 3")
    assert matrix.learned.min() == 1.0
    assert matrix.baseline is None
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


def test_tasks_may_share_one_head(fits):
    x, y = clusters(2 * ROWS, 0)
    halves = [Task(name, (x[rows], y[rows]), clusters(16, 1)) for name, rows in HALVES.items()]
    matrix, _ = learn(chain(multi_head=False), TaskStream.of(halves, num_outputs=4), epochs=10)
    assert matrix.values.tolist()[1] == [1.0, 1.0]
    assert matrix.average_accuracy == 1.0
    assert [call["sites"] for call in fits] == [["0.weight", "3.bias", "3.weight"]] * 2


def test_everything_may_be_measured_also_before_learning():
    matrix, _ = learn(measure_all=True, epochs=8)
    assert not matrix.values.isnan().any()
    assert matrix.baseline.shape == (2,)
    assert matrix.learned.min() == 1.0
    assert -1.0 <= matrix.forward_transfer <= 1.0


def test_the_part_to_measure_on_may_be_the_validation():
    tasks = stream(validation_fraction=0.25)
    x, y = tasks[0].validation
    wrong = Task("classes 0, 1", tasks[0].train, tasks[0].test, (x, 1 - y), head=0)
    tasks = TaskStream.of([wrong, tasks[1]], num_heads=2, num_outputs=2)
    on_test, _ = learn(tasks=tasks, epochs=8)
    on_validation, _ = learn(tasks=tasks, epochs=8, measure_on="validation")
    assert on_test.values[0, 0] == 1.0
    assert on_validation.values[0, 0] == 0.0


def test_the_guide_and_the_options_are_the_caller_s():
    one = chain(form="normal")
    learn(
        one, guide=lambda c: c.guide(AutoMeanField, reset_scales=True), loss=RadialELBO(2, strict_kl=True), accumulate=2
    )
    assert type(one.prior["trunk.0.weight"].base_dist).__name__ == "Normal"


def test_the_seed_decides_and_nothing_else_does():
    assert_same(learn(), learn())
    (_, one), (_, other) = learn(), learn(seed=4)
    assert not torch.equal(one["distributions.[trunk/0/weight].loc"], other["distributions.[trunk/0/weight].loc"])


@pytest.mark.parametrize("seed", [0, 20_240_101, 2**40])
def test_every_stage_has_a_seed_of_its_own(fits, seed, monkeypatch):
    seeds = []
    monkeypatch.setattr(stream_run.pyro, "set_rng_seed", partial_after(pyro.set_rng_seed, seeds.append))
    learn_stream(chain(), stream(), coreset=CORESET, measure_all=True, **{**OPTIONS, "seed": seed})
    # Two baselines; a task, its coreset and two predictions; a task, two coresets and two predictions.
    own = seeds[:2] + list(dict.fromkeys(seeds[2:]))
    assert len(own) == len(set(own)) == 2 + 4 + 5
    assert all(0 <= s < 2**32 for s in own)
    # Epochs count on from the seed of a fit, so neighbors would share their order of rows.
    ordered = sorted(call["seed"] for call in fits)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > OPTIONS["epochs"]


# Coresets


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


def test_a_single_head_learns_the_union_of_all_coresets(fits):
    coreset = Coreset(6, k_center_coreset, fit_options={"epochs": 1})
    learn(chain(multi_head=False), stream(multi_head=False), coreset=coreset, measure_all=True)
    assert [call["rows"] for call in fits] == [ROWS - 6, 6, ROWS - 6, 12]


def test_what_is_learned_from_a_coreset_is_thrown_away():
    """Layers that are trained and not random, and their statistics, too."""
    (_, short), (_, long) = (learn(coreset=Coreset(6, fit_options={"epochs": e})) for e in (1, 4))
    assert list(short) == list(long)
    for name, value in short.items():
        assert torch.equal(value, long[name]), name


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
        matrix, _ = learn(tasks=one, coreset=Coreset(6, lambda x, size, seed: kept, options), epochs=8)
        accuracies.append(float(matrix.values[0, 0]))
    assert accuracies[0] < 0.5
    assert accuracies[1] == 1.0


# Killed and resumed

STAGES = [
    # Of a fit: the first task, its coreset, the second task, the two coresets.
    *[(stream_run, "fit", at, "after") for at in (1, 2, 3, 5)],
    *[(TrainingRun, "step", at, "before") for at in (1, 4, 5, 8, 11)],
    *[(PriorChain, "advance", at, "after") for at in (1, 2)],
    *[(stream_run, "predict", at, "after") for at in (1, 3)],
    # Before the first task, between the two, and after the last.
    *[(stream_run, "save_checkpoint", at, when) for at in (1, 2, 3) for when in ("before", "after")],
]


@pytest.fixture(scope="module")
def undisturbed():
    return learn(coreset=CORESET, measure_all=True)


@pytest.mark.parametrize("where", STAGES, ids=lambda where: "-".join(map(str, where[1:])))
def test_a_killed_run_ends_as_an_undisturbed_one(where, undisturbed, monkeypatch, tmp_path):
    options = {"coreset": CORESET, "measure_all": True, "checkpoint": tmp_path}
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


def test_a_finished_run_only_reads(undisturbed, monkeypatch, tmp_path):
    options = {"coreset": CORESET, "measure_all": True, "checkpoint": tmp_path}
    learn(**options)
    monkeypatch.setattr(stream_run, "fit", None)
    monkeypatch.setattr(stream_run, "predict", None)
    assert_same(learn(**options), undisturbed)


@pytest.mark.parametrize("at", [2, 3], ids=["in the first task", "in the second"])
def test_a_single_head_resumes_too(at, monkeypatch, tmp_path):
    options = {"tasks": stream(multi_head=False), "checkpoint": tmp_path, "checkpoint_every": 1}
    one = learn(chain(multi_head=False), tasks=options["tasks"], checkpoint_every=1)
    killed(monkeypatch, chain(multi_head=False), TrainingRun, "step", at, "after", **options)
    assert_same(learn(chain(multi_head=False), **options), one)


def die_in_the_second_task(folder):
    """For a process of its own, with as many threads as the tests have: sums depend on their number."""
    torch.set_num_threads(1)

    def callback(record):
        if (Path(folder) / "task-1.pt").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    learn(checkpoint=folder, callback=callback, **{"epochs": 3})


def test_a_process_that_was_killed_is_continued_by_another(tmp_path):
    root = Path(__file__).resolve().parents[2]
    code = f"from tests.continual.test_learning import *; die_in_the_second_task({str(tmp_path)!r})"
    process = subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stream.pt", "task-1.pt"]

    def die_in_the_second_task(_):
        def callback(record):
            """The same by name, and harmless."""

        return callback

    callback = die_in_the_second_task(None)
    callback.__qualname__ = "die_in_the_second_task.<locals>.callback"
    assert_same(learn(checkpoint=tmp_path, epochs=3, callback=callback), learn(epochs=3, callback=callback))


# Bad input


def other_settings():
    return {
        "seed": {"seed": 4},
        "num_samples": {"num_samples": 4},
        "measure_all": {"measure_all": True},
        "measure_on": {"measure_on": "validation"},
        "coreset": {"coreset": CORESET},
        "guide": {"guide": lambda c: c.guide(AutoMeanField)},
        "tasks": {"tasks": stream(classes=[[0, 1], [3, 2]], validation_fraction=0.25)},
        "form": {"one": chain(form="normal")},
        "epochs": {"epochs": 3},
        "learning rate": {"optim": partial(torch.optim.Adam, lr=0.2)},
        "loss": {"loss": RadialELBO(kl_weight=0.5)},
    }


@pytest.mark.parametrize("setting", other_settings())
def test_other_settings_are_refused_in_the_first_task_and_after_it(setting, monkeypatch, tmp_path):
    tasks = stream(validation_fraction=0.25)
    options = {"tasks": tasks, "loss": RadialELBO(kl_weight=1.0), "checkpoint": tmp_path}
    killed(monkeypatch, None, stream_run, "fit", 1, "after", **options)
    changed = {**options, **other_settings()[setting]}
    one = changed.pop("one", None) or chain()
    before = {name: value.clone() for name, value in one.state_dict().items()}
    with pytest.raises(ValueError, match=r"stream\.pt was made with"):
        learn(one, **changed)
    for name, value in one.state_dict().items():
        assert torch.equal(value, before[name])


def test_pyro_s_optimizers_are_told_apart_by_their_settings(tmp_path):
    options = {"checkpoint": tmp_path}
    learn(optim=pyro.optim.Adam({"lr": 0.1}), **options)
    learn(optim=pyro.optim.Adam({"lr": 0.1}), **options)
    with pytest.raises(ValueError, match="fit_options"):
        learn(optim=pyro.optim.Adam({"lr": 0.2}), **options)


def test_another_model_is_refused(tmp_path):
    learn(checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"stream\.pt is from another model.*bnn\.net\.trunk\.1"):
        learn(chain(width=6), checkpoint=tmp_path)


def test_files_that_are_none_of_a_run(tmp_path):
    (tmp_path / "stream.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"stream\.pt is damaged or no checkpoint"):
        learn(checkpoint=tmp_path)
    torch.save({"format": 1}, tmp_path / "stream.pt")
    with pytest.raises(ValueError, match=r"stream\.pt was made with form=None"):
        learn(checkpoint=tmp_path)
    file = tmp_path / "a file"
    file.touch()
    one = chain()
    with pytest.raises(OSError, match="a file"):
        learn(one, checkpoint=file)
    # Before anything was learned.
    assert one.prior == {}


def test_a_new_run_starts_anew_where_only_a_task_was_left(monkeypatch, tmp_path):
    killed(monkeypatch, None, stream_run, "fit", 1, "after", seed=9, checkpoint=tmp_path)
    (tmp_path / "stream.pt").unlink()
    assert (tmp_path / "task-0.pt").exists()
    assert_same(learn(checkpoint=tmp_path), learn())


BAD = {
    "measure_on": ({"measure_on": "train"}, "measure_on must be one of"),
    "num_samples": ({"num_samples": 0}, "num_samples must be a positive integer"),
    "seed": ({"seed": -1}, "seed must be a non-negative integer"),
    "validation": ({"validation": clusters(8, 0)}, r"fit_options must not hold \['validation'\]"),
    "coreset's seed": ({"coreset": Coreset(2, fit_options={"seed": 1})}, r"of the coreset must not hold \['seed'\]"),
    "coreset's size": ({"coreset": Coreset(ROWS)}, f"coreset of {ROWS} rows leaves nothing of task 'classes 0, 1'"),
    "no validation": ({"measure_on": "validation"}, "task 'classes 0, 1' has no validation data"),
    "patience": ({"patience": 2}, "patience needs validation"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused_before_training(options, message):
    one = chain()
    with pytest.raises(ValueError, match=message):
        learn(one, **options)
    assert one.prior == {}


def test_a_network_without_the_head_of_a_task_is_refused_by_the_task_s_name():
    with pytest.raises(ValueError, match=r"task 'classes 2, 3' uses head 1, but .*MultiHead"):
        learn(chain(multi_head=False))
    tasks = split_by_class(clusters(2 * ROWS, 0), clusters(16, 1), classes_per_task=1)
    with pytest.raises(ValueError, match=r"task 'classes 2' uses head 2, but .*2 heads"):
        learn(tasks=tasks)


def test_what_is_no_chain_of_a_classifier_is_refused():
    for wrong in (chain().model, PriorChain(lambda x, y: None)):
        with pytest.raises(ValueError, match="chain must be a PriorChain around a SupervisedModel"):
            learn_stream(wrong, stream(), **OPTIONS)


def test_empty_coresets_and_tasks_are_refused():
    with pytest.raises(ValueError, match="Coreset: size must be a positive integer"):
        Coreset(0)
    with pytest.raises(ValueError, match="must hold from 1"):
        learn(coreset=Coreset(6, lambda x, size, seed: torch.tensor([], dtype=torch.long)))
    with pytest.raises(ValueError, match="task 'blank': train has no rows"):
        Task("blank", (torch.zeros(0, 4), torch.zeros(0).long()), clusters(4, 0))


def test_tasks_are_built_when_they_are_needed():
    tasks = permuted(clusters(ROWS, 0), clusters(16, 1), 3)
    matrix, _ = learn(chain(multi_head=False), tasks, epochs=1, guide=lambda c: c.guide(AutoRadial, init_stddev=0.1))
    assert matrix.values.tril().isfinite().all()
