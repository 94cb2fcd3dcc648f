# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Random numbers: their state, seeds, and turns for the threads that share them."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_radial._pyro.compat import forget_handlers

_turn = threading.RLock()
_forks = threading.local()
# A turn can last, and its thread can wait for the fork.
FORK_SECONDS = 30.0


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread is in such a block.

    All threads of a process share Pyro's handlers, plates and validation, and torch's generators: a model that runs
    while another thread runs another model gets that one's sites. ``fit``, ``predict``, ``diagnose`` and the ``setup``
    of a guide take turns, so they can run in several threads at once, each with its own model and guide; ``predict``
    can also share a model and guide. A turn is one training step, one validation, one ``diagnose``, and one draw, or
    all draws that run in one call.

    The order of turns is arbitrary, so a run in several threads cannot be repeated exactly, even with a seed. Put other
    programs, such as Pyro's ``SVI``, into such a block too. A fork of the process waits for the end of another thread's
    turn, because the child would inherit its handlers.
    """
    with _turn:
        yield


def _before_fork() -> None:
    """Wait until another thread's turn ends; otherwise the child would keep its handlers, seeds and modes."""
    _forks.waited = _turn.acquire(timeout=FORK_SECONDS)


def _after_fork(in_child: bool) -> None:
    """Give back the turn; a child that did not get it makes a new lock and leaves the other thread's handlers."""
    global _turn
    if _forks.waited:
        _turn.release()
    elif in_child:
        _turn = threading.RLock()
        forget_handlers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=partial(_after_fork, False),
        after_in_child=partial(_after_fork, True),
    )


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of torch's generators for a device, of Python's and of NumPy's."""
    # A Dataset that augments its items uses Python's and NumPy's.
    state = {"cpu": torch.get_rng_state(), **host_noise()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to a state from :func:`rng_state`."""
    torch.set_rng_state(state["cpu"].cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


class TorchNoise(NamedTuple):
    """The state of torch's generators alone, which is cheap enough to store at each step."""

    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def current(cls) -> "TorchNoise":
        """Return the current state."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        )

    def restore(self) -> None:
        """Restore the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside the block and restore them afterwards; other threads wait."""
    with one_at_a_time(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Only this device: seeding all devices takes longer and would change the others.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def host_noise() -> dict[str, Any]:
    """Return the state of Python's and NumPy's generators in plain values."""
    kind, words, *position = np.random.get_state()  # noqa: NPY002
    numpy_state = (kind, np.asarray(words).tolist(), *position)
    return {"python": random.getstate(), "numpy": numpy_state}
