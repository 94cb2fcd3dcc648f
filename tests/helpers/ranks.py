# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Processes that train together, as forks of the process that tests."""

import os
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

import pyro
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from pyro_radial import AutoMeanField, NaturalGradient, RadialELBO
from tests.helpers.runs import (
    Counting,
    assert_same,
    data,
    function_problem,
    functional_loss,
    problem,
    rates,
    regression,
    targets,
    trained,
    walking_loss,
)

SECONDS = 60


class Failed:
    """How a process ended that returned nothing: by an error, or by a signal."""

    def __init__(self, kind, text=""):
        self.kind, self.text = kind, text

    def __repr__(self):
        return f"{self.kind}: {self.text}"


def on_ranks(function, *args, size=2):
    """What a function of the rank, and of further arguments, returns in each of several processes.

    :returns: its values by rank; a :class:`Failed` for a process that raised an error or was killed.
    :raises TimeoutError: if a process has not ended after a minute.
    """
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        children = [_start(function, args, rank, size, port, Path(name)) for rank in range(size)]
        ends = _wait(children)
        return [_result(Path(name) / str(rank), end) for rank, end in enumerate(ends)]


def values(results):
    """The results of processes that all returned something."""
    assert not [result for result in results if isinstance(result, Failed)], results
    return results


def run(rank, make=problem, **settings):
    """A training in one process, with what tells how it left the process."""
    state, result = trained(*make(), **settings)
    return state, result, torch.rand(3), dist.is_initialized()


def assert_same_everywhere(results):
    """That all runs ended alike; returns the state and the result that they share."""
    (state, result, random, initialized), *others = values(results)
    assert not initialized
    for other, other_result, other_random, _ in others:
        assert_same(other, state)
        assert other_result == result
        # What a script draws next is the same again.
        assert torch.equal(other_random, random)
    return state, result


KINDS = {
    "plain": (problem, {}),
    "batch norm": (partial(problem, "batch norm"), {"validation": data(9, seed=4), "patience": 3, "batch_size": 5}),
    "dropout": (partial(problem, "dropout"), {"accumulate": 2}),
    "no seed": (problem, {"seed": None}),
    "model function": (function_problem, {}),
    "mean field": (partial(problem, guide=AutoMeanField), {"mean_only_epochs": 1, "clip_norm": 3.0}),
    "rates by name": (
        problem,
        {
            "optim": pyro.optim.Adam(rates),
            "scheduler": partial(CosineAnnealingLR, T_max=12),
            "scheduler_interval": "step",
        },
    ),
    "dataset": (problem, {"data": TensorDataset(*data())}),
    "natural gradient": (problem, {"optim": NaturalGradient(beta2=0.5)}),
    "autocast": (problem, {"autocast": torch.bfloat16}),
    "float16": (problem, {"autocast": torch.float16, "clip_norm": 5.0}),
    "schedule with a state": (problem, {"loss": lambda: RadialELBO(kl_weight=Counting())}),
    "walking points": (regression, {"loss": walking_loss, "data": targets()}),
    "functional in bfloat16": (regression, {"loss": functional_loss, "data": targets(), "autocast": torch.bfloat16}),
}


def run_kind(rank, kind, **settings):
    """One of ``KINDS`` in one process."""
    make, own = KINDS[kind]
    own = {**own, "loss": own["loss"]()} if "loss" in own else own
    return run(rank, make, **{"batch_size": 3, **own, **settings})


def _start(function, args, rank, size, port, folder):
    child = os.fork()
    if child:
        return child
    try:
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), **address})
        pyro.clear_param_store()
        try:
            result = function(rank, *args)
        except Exception as error:
            result = Failed(type(error).__name__, str(error))
        torch.save(result, folder / f"{rank}.partial")
        os.replace(folder / f"{rank}.partial", folder / str(rank))
    finally:
        os._exit(0)


def _wait(children):
    ends, deadline = {}, time.monotonic() + SECONDS
    try:
        while len(ends) < len(children):
            for child in children:
                if child not in ends:
                    found, status = os.waitpid(child, os.WNOHANG)
                    ends |= {child: status} if found else {}
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(children) - len(ends)} of {len(children)} processes have not ended")
            # All that are left have been stopped for good by what they wait for.
            time.sleep(0.01)
    finally:
        for child in set(children) - set(ends):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [ends[child] for child in children]


def _result(path, status):
    if path.exists():
        return torch.load(path, weights_only=False)
    return Failed("signal", str(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else "none")
