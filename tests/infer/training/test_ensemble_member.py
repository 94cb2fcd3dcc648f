# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A member in a process of its own: what it sends home when it fails, and that it ends with who began it."""

import os
import pickle
import signal
import time

import torch
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.training.ensemble_member import train_apart, train_in_process
from pyro_radial.nn import likelihoods

DATA = torch.zeros(4, 2), torch.zeros(4, 2)


class AwkwardError(Exception):
    """Of a library that did not think of processes: it is not read back with its message alone."""

    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")


def test_an_error_of_any_class_can_be_read_in_another_process_with_where_it_was():
    def make(seed):
        raise AwkwardError(5, "broken")

    outcome = train_apart(make, 0, 0, DATA, {})
    assert isinstance(outcome, RuntimeError)
    twin = pickle.loads(pickle.dumps(outcome))
    assert str(twin) == "AwkwardError: broken (5)"
    assert "in make" in twin.__notes__[0]


def linear(seed):
    model = SupervisedModel(BayesianModule(nn.Linear(2, 2)), likelihoods.Gaussian())
    return model, AutoRadial(model)


def train_for_good(parent, write):
    """Train until the process is ended, or say that it was not."""
    signal.signal(signal.SIGALRM, lambda *_: (os.write(write, b"late"), os._exit(1)))
    signal.alarm(20)
    began = iter([b"began"])
    train_in_process(
        parent, linear, 0, 0, DATA, {"epochs": 10**6, "callback": lambda _: os.write(write, next(began, b"")) and False}
    )
    os._exit(1)


def test_a_killed_process_takes_those_that_it_began_with_it():
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        parent = os.getpid()
        if os.fork() == 0:
            train_for_good(parent, write)
        os.close(write)
        time.sleep(60)
        os._exit(0)
    os.close(write)
    assert os.read(read, 5) == b"began"
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    # Nobody holds the other end any more.
    assert os.read(read, 5) == b""
    os.close(read)
