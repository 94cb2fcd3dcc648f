# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What several processes send each other, and what ends one ends all."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.training import distributed
from pyro_radial.infer.training.distributed import Processes, joined
from pyro_radial.infer.training.training_run import TrainingRun
from pyro_radial.nn import likelihoods
from tests.helpers.ranks import assert_same_everywhere, on_ranks, run, run_kind, values
from tests.helpers.runs import ROWS, assert_same, data, problem, targets, trained

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------ what is sent


def exchanged(rank):
    with joined(CPU) as together:
        shared = torch.full((2, 3), float(rank)), torch.tensor(rank == 0), torch.arange(3) + rank
        together.take_over(shared)
        used, idle, sparse = (nn.Parameter(torch.zeros(4, 2)) for _ in range(3))
        if rank == 0:
            used.grad = torch.full((4, 2), 0.5)
            rows = torch.tensor([[1]])
            sparse.grad = torch.sparse_coo_tensor(rows, torch.ones(1, 2), (4, 2), check_invariants=True)
        parameters = [used, idle, sparse]
        anywhere = together.sums(lambda: [float(p.grad is not None) for p in parameters], 3)
        together.sum_gradients(parameters, anywhere)
        return {
            "sums": together.sums(lambda: [1.0 + rank, 1e-9 * rank], 2),
            "gathered": together.gather({"rank": rank}),
            "first": together.from_first(lambda: f"made by {rank}"),
            "shared": shared,
            "gradients": [parameter.grad for parameter in parameters],
        }


def test_what_processes_send_each_other_arrives():
    for sent in values(on_ranks(exchanged)):
        assert sent["sums"] == [3.0, 1e-9]
        assert sent["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert sent["first"] == "made by 0"
        floats, flag, numbers = sent["shared"]
        assert (floats.tolist(), flag.item(), numbers.tolist()) == ([[0.0] * 3] * 2, True, [0, 1, 2])
        used, idle, sparse = sent["gradients"]
        assert used.tolist() == [[0.5, 0.5]] * 4
        # An optimizer passes over a parameter without a gradient, and not over one whose gradient is zero.
        assert idle is None
        assert sparse.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_a_process_that_trains_alone_sends_nothing_and_keeps_its_errors():
    with joined(CPU) as alone:
        assert (alone.rank, alone.size, alone.is_first) == (0, 1, True)
        assert alone.sums(lambda: (2.0,), 1) == [2.0]
        assert alone.gather("a") == ["a"]
        assert alone.from_first(lambda: 3) == 3
        with pytest.raises(KeyError, match="b"), alone.together():
            raise KeyError("b")
    assert not dist.is_initialized()


class OwnError(LookupError):
    """An error that is none of Python's, and is made of two things."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def bar_made(rank):
    return tqdm(total=1, disable=True).total


def test_a_process_waits_for_no_bar_of_the_one_that_forked_it():
    held, forked = Event(), Event()

    def hold():
        with tqdm.get_lock():
            held.set()
            forked.wait()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(hold)
        held.wait()
        try:
            assert on_ranks(bar_made) == [1, 1]
        finally:
            forked.set()


def failing(rank, error, where):
    with joined(CPU) as together:
        if where == "first":
            together.from_first(lambda: 1 if rank else raise_(error))
        with together.together():
            if rank == 1:
                raise error


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FloatingPointError("not finite"), "FloatingPointError", "not finite"),
        (OwnError("a", "b"), "LookupError", "OwnError: a and b"),
        (UnicodeDecodeError("utf8", b"", 0, 1, "why"), "RuntimeError", "'utf8' codec can't decode"),
    ],
)
@pytest.mark.parametrize("where", ["first", "second"])
def test_an_error_of_one_process_is_raised_in_all(error, kind, text, where):
    results = on_ranks(failing, error, where)
    assert {(result.kind, result.text) for result in results} == {(kind, results[0].text)}
    assert results[0].text.startswith(text)
    assert results[0].text.endswith(f"(in process {1 if where == 'second' else 0} of 2)")


# -------------------------------------------------------------------------------- what the first process decides


def watched(rank, folder, **settings):
    seen, starts, (model, guide) = [], [], problem()
    name, original = "locs.2.bias_unconstrained", TrainingRun.step

    def callback(record):
        seen.append(record)
        with torch.no_grad():
            dict(guide.named_parameters())[name].fill_(7.0)
        return record["epoch"] == 1

    def step(self):
        starts.append(dict(guide.named_parameters())[name].tolist())
        original(self)

    TrainingRun.step = step
    state, result = trained(model, guide, batch_size=3, epochs=5, callback=callback, progress=True, **settings)
    # What it changes in one process is changed in all, before the next step and at the end.
    assert starts[4] == state[f"guide.{name}"].tolist() == [7.0, 7.0]
    return result, seen, sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("kept", [True, False])
def test_the_first_process_alone_calls_back_and_writes(kept, tmp_path, capfd):
    settings = {"checkpoint": tmp_path / "run.pt"} if kept else {}
    (result, seen, files), (other, unseen, _) = values(on_ranks(partial(watched, **settings), tmp_path))
    assert result == other
    assert result.stopped_early
    assert (seen, unseen) == (result.history, [])
    assert files == (["run.pt"] if kept else [])
    assert capfd.readouterr().err.count("| 0/20 ") == 1


# ------------------------------------------------------------------------------------------------ resume, and ends


def disturbed_at(step, disturb):
    """Has a process do something before one of its steps."""
    original, steps = TrainingRun.step, 0

    def disturbed(self):
        nonlocal steps
        steps += 1
        if steps == step:
            disturb()
        original(self)

    TrainingRun.step = disturbed


def killed(rank, kind, path):
    if rank:
        disturbed_at(6, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return run_kind(rank, kind, checkpoint=path, checkpoint_every=1)


@pytest.mark.parametrize("kind", ["batch norm", "no seed", "walking points"])
def test_a_run_of_which_one_process_is_killed_goes_on_bit_for_bit(kind, tmp_path):
    path = tmp_path / "run.pt"
    first, second = on_ranks(killed, kind, path)
    assert repr(second) == f"signal: {int(signal.SIGKILL)}"
    assert first.kind == "RuntimeError"
    assert "another process of this training has ended" in first.text
    resumed = partial(run_kind, kind=kind, checkpoint=path, checkpoint_every=1)
    undisturbed = partial(run_kind, kind=kind, checkpoint=tmp_path / "undisturbed.pt", checkpoint_every=1)
    state, result = assert_same_everywhere(on_ranks(undisturbed))
    resumed_state, resumed_result = assert_same_everywhere(on_ranks(resumed))
    assert resumed_result == result
    assert_same(resumed_state, state)


def stuck(rank):
    if rank:
        disturbed_at(3, lambda: time.sleep(3))
    return run_kind(rank, "plain", timeout=2.0)


def test_a_process_that_does_not_answer_is_not_waited_for_without_end():
    for result in on_ranks(stuck):
        assert result.kind == "RuntimeError"
        assert "has not answered within the timeout of FitOptions" in result.text


LEFT_OVER = """
import torch
from pyro_radial import FitOptions
from pyro_radial.infer.training import distributed
from tests.helpers.runs import problem, trained

distributed.NOTICE_AFTER = 0.1
trained(*problem(), timeout=1.5)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_waits_for_others_that_nobody_started_says_so_and_ends(rank):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    left = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), **left}
    command = [sys.executable, "-W", "ignore", "-c", LEFT_OVER]
    process = subprocess.run(command, env=environment, timeout=60, capture_output=True, check=False, text=True)
    assert f"fit: process {rank} of 2 waits for the others at localhost:{port}, at most 1.5 seconds" in process.stderr
    assert "unset RANK and WORLD_SIZE to train in this process alone" in process.stderr.splitlines()[-1]
    assert process.returncode == 1


def resumed_by(rank, path, **settings):
    return run(rank, checkpoint=path, batch_size=3, **settings)


def test_a_checkpoint_of_another_number_of_processes_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    values(on_ranks(resumed_by, path))
    with pytest.raises(ValueError, match="was made with processes=2, this run has processes=1"):
        resumed_by(0, path)
    alone = tmp_path / "alone.pt"
    resumed_by(0, alone)
    for result in on_ranks(resumed_by, alone):
        assert result.kind == "ValueError"
        assert "was made with processes=1, this run has processes=2" in result.text


class Failing(SGD):
    """An optimizer that fails in the second process, after gradients have been exchanged."""

    def step(self, closure=None):
        if os.environ["RANK"] == "1":
            raise MemoryError("no memory left")
        return super().step(closure)


def test_a_process_that_leaves_between_exchanges_is_not_waited_for():
    first, second = on_ranks(partial(run, optim=partial(Failing, lr=0.1)))
    assert repr(second) == "MemoryError: no memory left"
    assert first.kind == "RuntimeError"
    assert "another process of this training has ended" in first.text


class OverflowingInOne(nn.Linear):
    """Overflows in the second process, once it has been called a few times."""

    calls = 0

    def forward(self, x):
        OverflowingInOne.calls += 1
        return super().forward(x) * (
            float("inf") if OverflowingInOne.calls > 6 and os.environ.get("RANK") == "1" else 1.0
        )


def overflowing(rank, path):
    model = SupervisedModel(BayesianModule(OverflowingInOne(3, 2)), likelihoods.Gaussian())
    return trained(model, AutoRadial(model), data=targets(), batch_size=3, checkpoint=path, checkpoint_every=1)


def test_a_loss_that_is_not_finite_in_one_process_stops_all_by_its_name(tmp_path):
    one, other = on_ranks(overflowing, tmp_path / "run.pt")
    assert repr(one) == repr(other)
    assert one.kind == "FloatingPointError"
    assert "log-likelihood of site 'y'" in one.text
    assert "(in process 1 of 2)" in one.text
    assert torch.load(tmp_path / "run.pt", weights_only=True)["step_in_epoch"] > 0


def refusing(rank, what):
    def refuse(*args):
        raise OSError(f"no {what} here")

    class Broken(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index) if rank == 0 or index < 2 else refuse()

    settings = {"callback": {"callback": refuse}, "dataset": {"data": Broken(*data())}}[what]
    return run(rank, **settings)


@pytest.mark.parametrize("what", ["callback", "dataset"])
def test_what_fails_in_one_process_fails_in_all(what):
    for result in on_ranks(refusing, what):
        assert result.kind == "OSError"
        assert result.text == f"no {what} here (in process {int(what == 'dataset')} of 2)"


# ------------------------------------------------------------------------------------------------------ bad input


def test_processes_that_nccl_would_find_on_one_device_are_refused(monkeypatch):
    class Two(Processes):
        def gather(self, value):
            return [("here", "cuda:1"), value]

    monkeypatch.setattr(distributed.socket, "gethostname", lambda: "here")
    for backend, number, message in (
        ("cpu:gloo,cuda:nccl", 1, "got cuda:1 in processes 0 and 1"),
        ("cuda:nccl", 0, ""),
        ("cuda:gloo", 1, ""),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda backend=backend: backend)
        expected = pytest.raises(ValueError, match=message) if message else nullcontext()
        with expected:
            distributed._check_devices(Two(1, 2), torch.device("cuda", number))


def wider():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=ROWS))
    return model, AutoRadial(model)


def nan_in_a_row():
    x, y = data()
    x[4] = float("nan")
    return x, y


OTHERS = {
    "batch size": ({"batch_size": 4}, "batch_size=6 in process 0 and batch_size=4 in process 1"),
    "seed": ({"seed": 6}, "seed=5 in process 0 and seed=6 in process 1"),
    "rate": (
        {"optim": partial(Adam, lr=0.1)},
        "learning rates=[0.001] in process 0 and learning rates=[0.1] in process 1",
    ),
    "epochs": ({"epochs": 7}, "epochs=3 in process 0 and epochs=7 in process 1"),
    "labels": ({"data": (data()[0], 1 - data()[1])}, "y='torch.int64 (20,) sha256"),
    "rows": ({"data": data(19), "num_data": ROWS}, "rows=20 in process 0 and rows=19 in process 1"),
    "model": ({"make": wider}, "model.bnn.net.0='Linear(in_features=3, out_features=6, bias=True)' in process 0 and"),
    "layers": ({"make": partial(problem, "dropout")}, "model.bnn.net.1='Tanh()' in process 0 and"),
    "guide": ({"make": partial(problem, guide=AutoMeanField)}, "guide='AutoRadial' in process 0"),
    "nan": ({"data": nan_in_a_row()}, "data: x must not hold NaN, got NaN in 1 of 20 rows, first in row 4 (in process"),
    "checkpoint": ({"checkpoint": "nowhere.pt"}, "checkpoint=False in process 0 and checkpoint=True in process 1"),
}


def other_in_one(rank, settings):
    return run(rank, **(settings if rank else {}))


@pytest.mark.parametrize("other", OTHERS)
def test_processes_that_would_train_another_run_are_refused_by_what_differs(other):
    settings, message = OTHERS[other]
    for result in on_ranks(other_in_one, settings):
        assert result.kind == "ValueError"
        assert message in result.text


def few_rows(rank):
    model, guide = problem(likelihood=likelihoods.Categorical())
    with pytest.raises(ValueError, match=r"data must have at least one row for each process, got 1 rows for 2"):
        trained(model, guide, data=data(1))
    return guide.prototype_trace is None


def test_more_processes_than_rows_are_refused_before_anything_is_trained():
    assert values(on_ranks(few_rows)) == [True, True]


# ------------------------------------------------------------------------------------------------------- torchrun

SCRIPT = """
import os, sys, torch
from tests.helpers.runs import problem, trained

torch.set_num_threads(1)
for seed in (1, 2, 3, 4):
    state, result = trained(*problem(), seed=seed, epochs=2, batch_size=3)
    assert not torch.distributed.is_initialized()
torch.save((state, result), f"{sys.argv[1]}/{os.environ['RANK']}.bin")
if os.environ["RANK"] == "1":
    os._exit(7)
trained(*problem())
"""


def torchrun(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, timeout=120, capture_output=True, check=False
    )


def test_a_script_under_torchrun_trains_any_number_of_times(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = torchrun(script, tmp_path)
    assert process.returncode
    assert "exitcode  : 7" in process.stderr.decode()
    (state, result), (other, other_result) = (
        torch.load(tmp_path / f"{rank}.bin", weights_only=False) for rank in (0, 1)
    )
    assert_same(state, other)
    assert result == other_result
