# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Turns for threads at Pyro's handlers, of which a process has one stack."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["one_at_a_time"]

_turn = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread is in such a block, and keep the others waiting until this one ends.

    Pyro's handlers, plates and validation, and torch's generators of random numbers, are one for all threads: a model
    that runs while another thread runs another gets the other's sites. ``fit``, ``predict``, ``diagnose`` and the
    ``setup`` of a guide take turns, so they may run in several threads at once, each with a model and guide of its own;
    ``predict`` also with a model and guide that others predict with. A turn is one training step, one validation, one
    draw of ``predict``, or one ``diagnose``.

    No order of the turns is promised, nor of the random numbers, which threads take from the same generators: a run
    beside others cannot be repeated number by number, not even with a seed, nor can one with a checkpoint be resumed
    so. What else runs models, Pyro's ``SVI`` and ``Predictive`` say, knows of no turns unless it is put into such a
    block.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial._pyro import one_at_a_time
        >>> with one_at_a_time():
        ...     value = pyro.sample("w", dist.Normal(0.0, 1.0))
    """
    with _turn:
        yield


def _start_anew() -> None:
    """A process that was forked has none of the threads that its parent waited for."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
