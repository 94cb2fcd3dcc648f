# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Processes that train one guide together, where an error of one process ends all of them.

``DistributedDataParallel`` does not fit: it does not see parameters from ``pyro.param``, gives each process the same
weight even if their batches differ in size, and waits for a process that has failed.
"""

import builtins
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_radial._pyro.compat import rendezvous

__all__ = ["Processes", "joined", "num_processes"]

T = TypeVar("T")

# Seconds until a process says what it waits for.
NOTICE_AFTER = 10.0
# The environment variables that torchrun sets.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_stores: list[Any] = []
_trainings = itertools.count()


@contextmanager
def joined(device: torch.device, seconds: float = 1800.0) -> Iterator["Processes"]:
    """The processes of this training, from ``torch.distributed`` if it is initialized, else from ``torchrun``.

    A process waits so many seconds for another, which may be busy with a callback. It notices a dead one at once.
    """
    if num_processes() == 1:
        yield Processes()
        return
    ours, timeout = not dist.is_initialized(), timedelta(seconds=seconds)
    if ours:
        with _notice(seconds):
            _initialize(device, timeout)
    try:
        # A group of our own keeps messages apart from the user's. Gloo notices a dead process at once, NCCL does not.
        group = dist.new_group(backend="gloo", timeout=timeout)
        try:
            together = Processes(dist.get_rank(), dist.get_world_size(), group)
            _check_devices(together, device)
            yield together
        finally:
            # Torch 2.7 can deadlock if a group ends while a thread of gloo still releases its last message.
            time.sleep(0.05)
            dist.destroy_process_group(group)
    finally:
        if ours:
            dist.destroy_process_group()


class Processes:
    """This process among those that train together. All of them must call the same methods in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self.is_first, self._group = rank, size, rank == 0, group

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        _send(dist.all_gather_object, values, value, group=self._group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of the block in all processes. The block itself must not send anything."""
        failure = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
        for rank, report in enumerate(self.gather(None if failure is None else _report(failure))):
            if report is not None:
                raise _error(report[0], f"{report[1]} (in process {rank} of {self.size})") from failure

    def from_first(self, make: Callable[[], T]) -> T:
        """Make a value in the first process and send it to all; if that fails, all raise the error."""
        if self.size == 1:
            return make()
        made: list[Any] = []
        with self.together():
            made = [make() if self.is_first else None]
        _send(dist.broadcast_object_list, made, src=0, group=self._group)
        return cast("T", made[0])

    def sums(self, compute: Callable[[], Sequence[float]], number: int) -> list[float]:
        """The sums over processes of the ``number`` numbers that each computes; if one fails, all raise its error."""
        numbers: Sequence[float] = [0.0] * number
        with self.together():
            numbers = compute()
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    @torch.no_grad()
    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have in the first process."""
        if self.size > 1:
            own = list(tensors)
            for tensor, value in zip(own, self.from_first(lambda: [t.detach().cpu() for t in own]), strict=True):
                tensor.copy_(value)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor], anywhere: Sequence[float]) -> None:
        """Sum each parameter's gradient over the processes; ``anywhere`` says in how many it has one."""
        if self.size == 1:
            return
        groups: dict[Any, list[Tensor]] = {}
        for parameter in (parameter for parameter, number in zip(parameters, anywhere, strict=True) if number):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient if gradient.layout is torch.strided else gradient.to_dense()
            groups.setdefault((parameter.device, parameter.dtype), []).append(parameter.grad)
        for (device, _), gradients in groups.items():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            _send(dist.all_reduce, flat, group=self._group if device.type == "cpu" else None)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view(gradient.shape))


def num_processes() -> int:
    """The number of processes of ``torch.distributed``, or of ``torchrun``."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHED) else 1


@contextmanager
def _notice(seconds: float) -> Iterator[None]:
    """Say on stderr what this process waits for, unless the block ends soon."""
    rank, size, *address = (os.environ[name] for name in LAUNCHED)
    text = (
        f"fit: process {rank} of {size} waits for the others at {':'.join(address)}, at most {seconds:g} seconds; to "
        "train in this process alone, unset RANK and WORLD_SIZE"
    )
    notice = threading.Timer(NOTICE_AFTER, print, (text,), {"file": sys.stderr, "flush": True})
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def _initialize(device: torch.device, timeout: timedelta) -> None:
    """Initialize ``torch.distributed`` from the environment, any number of times."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if not _stores:
        _stores.extend(_send(rendezvous, timeout))
    store, rank, size = _stores
    # Keys of an earlier training are still in the store.
    own = dist.PrefixStore(f"pyro_radial/{next(_trainings)}", store)  # type: ignore[attr-defined]
    _send(dist.init_process_group, backend, store=own, rank=rank, world_size=size, timeout=timeout)


def _check_devices(processes: Processes, device: torch.device) -> None:
    """Raise a ValueError if two processes share a device, where NCCL only says that it failed."""
    if device.type != "cuda" or "cuda:nccl" not in str(dist.get_backend_config()):
        return
    places = processes.gather((socket.gethostname(), str(device)))
    for rank, place in enumerate(places):
        if places.index(place) < rank:
            raise ValueError(
                f"model must be on a device of its own in each process, got {place[1]} in processes "
                f"{places.index(place)} and {rank}; move model and guide to cuda:N first, with N from LOCAL_RANK"
            )


def _send(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of ``torch.distributed``, and explain its errors."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(
            "another process of this training has ended, or has not answered within the timeout of FitOptions; see its "
            "output, and start all processes again, or unset RANK and WORLD_SIZE to train in this process alone. "
            f"torch says: {str(error).partition(chr(10))[0]}"
        ) from error


def _report(failure: Exception) -> tuple[str, str]:
    """The first built-in class of an error, which every process knows, and its text."""
    kind = next(kind for kind in type(failure).__mro__ if kind.__module__ == "builtins")
    return kind.__name__, str(failure) if kind is type(failure) else f"{type(failure).__name__}: {failure}"


def _error(name: str, text: str) -> Exception:
    with suppress(TypeError):  # Some classes take more than a text.
        return cast("Exception", getattr(builtins, name)(text))
    return RuntimeError(text)
