# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Whether a program is being captured as a graph, in which no value may be read on the host."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["capturing", "is_capturing"]


class _State(threading.local):
    capturing = False


_state = _State()


def is_capturing() -> bool:
    """Whether this thread is recording operations instead of using their results."""
    return _state.capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Say so to what would otherwise look at a value."""
    before, _state.capturing = _state.capturing, True
    try:
        yield
    finally:
        _state.capturing = before
