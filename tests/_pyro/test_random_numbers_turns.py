# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Threads that train, predict and diagnose at once get what they would get alone."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyro
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, diagnose, fit, predict
from pyro_radial._pyro import random_numbers
from pyro_radial._pyro.naming import unique_name
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial.nn import likelihoods

pytestmark = pytest.mark.usefixtures("impatient_threads")


def at_once(function, arguments):
    """``[function(argument), ...]``, each in a thread of its own, all started together."""
    barrier = threading.Barrier(len(arguments))

    def call(argument):
        barrier.wait()
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(call, arguments))


def pinned(width):
    """A model of that many inputs, and a guide whose draws are its network to four digits."""
    net = nn.Sequential(nn.Linear(width, 3 + width), nn.Tanh(), nn.Linear(3 + width, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=10, scale=0.1))
    guide = AutoRadial(model, init_stddev=1e-6)
    guide.setup(torch.zeros(1, width), torch.zeros(1, 2))
    return model, guide


def test_fits_in_threads_each_learn_their_own():
    slopes = [torch.linspace(-1.0, 1.0, 2), torch.linspace(2.0, -2.0, 3)]

    def run(slope):
        x = torch.randn(40, len(slope))
        data = x, (x @ slope)[:, None]
        bnn = BayesianModule(nn.Linear(len(slope), 1))
        model = SupervisedModel(bnn, likelihoods.Gaussian(num_data=40, scale=0.1))
        guide = AutoMeanField(model)
        options = {"optim": partial(torch.optim.Adam, lr=0.05), "loss": TermsELBO(strict_kl=True), "progress": False}
        result = fit(model, guide, data, epochs=60, batch_size=20, validation=data, **options)
        diagnosis = diagnose(model, guide, data, num_particles=2)
        return guide.median()["weight"], result, diagnosis

    for (weight, result, diagnosis), slope in zip(at_once(run, slopes), slopes, strict=True):
        # The noise of 0.1 over the root of 40 rows, five times over.
        assert torch.allclose(weight[0], slope, atol=0.08)
        assert len(result.history) == 60
        assert set(diagnosis.terms.kl_by_site) == {"weight", "bias"}
    assert not pyro.poutine.runtime._PYRO_STACK


def test_modules_made_in_threads_have_names_of_their_own():
    classes = [type(f"Made{number}InThreads", (), {}) for number in range(200)]
    names = at_once(lambda _: [unique_name(cls) for cls in classes], range(4))
    assert len({name for names_of_thread in names for name in names_of_thread}) == 800


def test_seeded_numbers_are_drawn_by_one_thread_alone():
    def run(seed):
        draws = []
        for _ in range(10):
            with seeded(seed, torch.device("cpu")):
                draws.append(torch.stack([torch.randn(()) for _ in range(5)]))
        return draws

    expected = {seed: run(seed)[0] for seed in range(4)}
    for seed, draws in zip(range(4), at_once(run, range(4)), strict=True):
        assert all(torch.equal(draw, expected[seed]) for draw in draws)


def test_a_block_does_not_wait_for_itself_and_lets_the_next_one_in_if_it_fails():
    with pytest.raises(ZeroDivisionError), one_at_a_time(), one_at_a_time():
        raise ZeroDivisionError
    assert at_once(_enter, [0]) == [True]


def in_a_fork(function):
    """What a function returns in a forked process; None if that fails."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        result = file.read()
    os.waitpid(child, 0)
    return pickle.loads(result) if result else None


def test_processes_forked_while_another_thread_trains_predict_as_without_it():
    (model, guide), (other, other_guide) = pinned(2), pinned(3)
    x = torch.randn(5, 2)
    done = threading.Event()

    def train():
        while not done.is_set():
            fit(other, other_guide, (torch.randn(10, 3), torch.randn(10, 2)), epochs=2, progress=False)

    def run():
        torch.manual_seed(0)
        return predict(model, guide, x, num_samples=2).samples.tolist(), pyro.settings.get("validate_poutine")

    expected = run()
    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert [in_a_fork(run) for _ in range(8)] == [expected] * 8
    finally:
        done.set()
        thread.join()
    # The forks have given back their turns.
    assert at_once(_enter, [0]) == [True]


def test_a_forked_process_waits_for_no_thread_of_its_parent(monkeypatch):
    held, done = threading.Event(), threading.Event()
    monkeypatch.setattr(random_numbers, "FORK_SECONDS", 0.1)

    def hold():
        with one_at_a_time(), pyro.poutine.block(), pyro.plate("rows", 3):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        assert in_a_fork(partial(_enter, 0))
    finally:
        done.set()
        thread.join()


def _enter(_):
    with one_at_a_time():
        return not pyro.poutine.runtime._PYRO_STACK
