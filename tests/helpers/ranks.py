# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Processes that train together, as forks of the process that tests."""

import os
import signal
import socket
import tempfile
import time
from pathlib import Path

import pyro
import torch

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
