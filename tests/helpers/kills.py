# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Runs that are killed, and files that are damaged."""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pyro
import torch
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from pyro_radial import TermsELBO
from tests.helpers.runs import FIT, assert_same, data, problem, regression, state_of, targets, trained, walking_loss
from tests.helpers.streams import CORESET, learn

MANY = {"epochs": 8, "checkpoint_every": 1}


def fitted(make, **settings):
    def run(checkpoint):
        fresh = {"loss": settings["loss"]()} if "loss" in settings else {}
        state, result = trained(*make(), **{**MANY, **settings, **fresh}, checkpoint=checkpoint and checkpoint / "a.pt")
        return {**state, "result": repr(result)}

    return run


def streamed(checkpoint):
    matrix, state = learn(coreset=CORESET, checkpoint=checkpoint, checkpoint_every=1)
    return {**state, "matrix": matrix.values}


KINDS = {
    "plain": fitted(problem),
    "vectorized": fitted(problem, loss=lambda: TermsELBO(num_particles=3, vectorize_particles=True)),
    "functional with walking points": fitted(regression, loss=walking_loss, data=targets()),
    "scheduled": fitted(problem, optim=partial(Adam, lr=0.1), scheduler=partial(StepLR, step_size=1, gamma=0.5)),
    "stream": streamed,
}


def in_a_process(kind, folder, seconds=None):
    """Run in a fork; the path of its result, None if it was killed after so many seconds."""
    result = folder / "result.bin"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            pyro.clear_param_store()
            torch.save(KINDS[kind](folder / "kept"), result)
            status = 0
        finally:
            os._exit(status)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert os.waitstatus_to_exitcode(status) == 0
    return result


def kill_and_resume(kind, count, seed=0):
    """Kill so many runs at random moments and resume each until it ends.

    :param str kind: one of ``KINDS``.
    :param int count: the kills.
    :param int seed: of their moments.
    :returns: how many were killed, and how many ended as the undisturbed run did.
    """
    generator, killed, same = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        start = time.monotonic()
        expected = torch.load(in_a_process(kind, _fresh(name, "undisturbed")), weights_only=False)
        took = time.monotonic() - start
        runs = 0
        while killed < count:
            folder = _fresh(name, str(runs))
            runs += 1
            done = in_a_process(kind, folder, generator.uniform(0.05, 0.95) * took)
            killed += done is None
            state = torch.load(done or in_a_process(kind, folder), weights_only=False)
            same += done is None and _are_same(state, expected)
    return killed, same


def _fresh(parent, name):
    folder = Path(parent) / name
    (folder / "kept").mkdir(parents=True)
    return folder


def _are_same(one, other):
    assert list(one) == list(other)
    return all(
        torch.equal(value.nan_to_num(-1.0), other[name].nan_to_num(-1.0))
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in one.items()
    )


def flip_bits(folder, count, seed=0):
    """How often one flipped bit of a checkpoint was refused, and named; anything else fails the assertion.

    :param folder: where the checkpoint goes.
    :param int count: bits to flip, each alone.
    :param int seed: of the choice of bits.
    """
    path, generator, outcomes = folder / "run.pt", random.Random(seed), Counter()
    trained(*problem("batch norm"), checkpoint=path)
    content = path.read_bytes()
    model, guide = problem("batch norm")
    guide.setup(*data())
    start = state_of(model, guide)
    for _ in range(count):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(damaged))
        generators = torch.get_rng_state()
        try:
            trained(model, guide, epochs=FIT["epochs"] + 1, checkpoint=path)
        except ValueError as error:
            outcomes["refused"] += 1
            outcomes["named"] += "run.pt" in str(error)
        assert_same(state_of(model, guide), start)
        assert path.read_bytes() == bytes(damaged)
        torch.set_rng_state(generators)
    return outcomes
