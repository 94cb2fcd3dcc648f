# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The processes that train one guide together: what they send each other, and how a failure of one ends all."""

import builtins
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_radial._pyro.compat import rendezvous

__all__ = ["Processes", "joined", "num_processes"]

T = TypeVar("T")

#: How long a process waits for the others, torch's own default: a validation or a callback may take a while. One that
#: has died is noticed at once.
TIMEOUT = timedelta(minutes=30)
# What torchrun, and others that launch processes for torch, tell each of them.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_stores: list[Any] = []
_trainings = itertools.count()


@contextmanager
def joined(device: torch.device) -> Iterator["Processes"]:
    """The processes of this training: those of ``torch.distributed`` where it is initialized, or else of ``torchrun``.

    Under ``torchrun`` alone it is initialized for the while, with NCCL for gradients on CUDA and gloo for the rest.

    :param torch.device device: where this process trains.
    :raises ValueError: for processes that NCCL would find on one device.
    """
    if num_processes() == 1:
        yield Processes()
        return
    ours = not dist.is_initialized()
    if ours:
        _initialize(device)
    try:
        # A group of our own, so that what is sent here meets nothing else. Over gloo, since its connections end with a
        # process, which NCCL notices by its timeout alone.
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        try:
            together = Processes(dist.get_rank(), dist.get_world_size(), group)
            _check_devices(together, device)
            yield together
        finally:
            # In torch 2.7 the end of a group waits, with the interpreter's lock, for threads of gloo's; one of them may
            # still want that lock to let go of the last message.
            time.sleep(0.05)
            dist.destroy_process_group(group)
    finally:
        if ours:
            dist.destroy_process_group()


class Processes:
    """This process among those that train together; the methods send, and all must call them in the same order.

    A process that trains alone, as by default, sends nothing.

    :param int rank: which one this is, from zero; the first validates and writes checkpoints.
    :param int size: how many there are.
    :param group: that of ``torch.distributed``, for numbers and objects.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes, shows and decides."""
        return self.rank == 0

    def sums(self, compute: Callable[[], Sequence[float]], number: int) -> list[float]:
        """The sums over processes of the numbers that each computes; where one fails, all raise its error.

        :param compute: computes the numbers, and sends nothing meanwhile.
        :param int number: how many there are.
        :raises Exception: what one has raised, with the number of its process.
        """
        if self.size == 1:
            return list(compute())
        numbers, failure = [0.0] * number, None
        try:
            numbers = list(compute())
        except Exception as error:
            failure = error
        sent = torch.tensor([float(failure is not None), *numbers], dtype=torch.double)
        with _answered():
            dist.all_reduce(sent, group=self._group)
        failures, *totals = sent.tolist()
        if failures:
            self._raise(failure)
        return totals

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails within the block in one process fails in all; nothing may be sent meanwhile."""
        failure = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
        if self.size > 1:
            self.sums(lambda: _reraise(failure), 0)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _answered():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, in all; where that fails, all raise its error."""
        if self.size == 1:
            return make()
        made: list[Any] = [None]
        with self.together():
            if self.is_first:
                made = [make()]
        with _answered():
            dist.broadcast_object_list(made, src=0, group=self._group)
        value: T = made[0]
        return value

    @torch.no_grad()
    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have in the first process."""
        if self.size == 1:
            return
        for group in _alike(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            with _answered():
                # As bytes, of which there are no kinds that a backend lacks.
                dist.broadcast(flat.view(torch.uint8), src=0, group=self._group_of(flat))
            _put_back(flat, group)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[Tensor], anywhere: Sequence[float]) -> None:
        """Give each parameter the sum of its gradients in all processes.

        :param parameters: in the same order in all.
        :param anywhere: of each parameter, in how many processes it has a gradient; with none it stays without.
        """
        if self.size == 1:
            return
        wanted = [parameter for parameter, number in zip(parameters, anywhere, strict=True) if number]
        for parameter in wanted:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient if gradient.layout is torch.strided else gradient.to_dense()
        for group in _alike(p.grad for p in wanted if p.grad is not None):
            flat = torch.cat([gradient.reshape(-1) for gradient in group])
            with _answered():
                dist.all_reduce(flat, group=self._group_of(flat))
            _put_back(flat, group)

    def _group_of(self, tensor: Tensor) -> Any:
        """Tensors on a device go where ``torch.distributed`` was initialized to send them."""
        return self._group if tensor.device.type == "cpu" else None

    def _raise(self, failure: Exception | None) -> None:
        """Raise the error of the first process that reports one."""
        for rank, report in enumerate(self.gather(None if failure is None else _report(failure))):
            if report is not None:
                name, text = report
                raise _error(name, f"{text} (in process {rank} of {self.size})") from failure


def num_processes() -> int:
    """How many processes a training here is of: those of ``torch.distributed``, or those launched with this one."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in LAUNCHED) else 1


def _initialize(device: torch.device) -> None:
    """Initialize ``torch.distributed`` as ``torchrun`` says, any number of times."""
    with _answered():
        if not _stores:
            _stores.extend(rendezvous(TIMEOUT))
        store, rank, size = _stores
        # What the processes of an earlier training have left in the store would be taken for those of this one.
        own_part = dist.PrefixStore(f"pyro_radial/{next(_trainings)}", store)  # type: ignore[attr-defined]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo",
            store=own_part,
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )


def _check_devices(processes: Processes, device: torch.device) -> None:
    """Refuse processes that share a device, of which NCCL only says that it failed."""
    if device.type != "cuda" or "cuda:nccl" not in str(dist.get_backend_config()):
        return
    users: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(processes.gather((socket.gethostname(), str(device)))):
        if place in users:
            raise ValueError(
                f"fit: model must be on a device of its own in each process, got {place[1]} in processes "
                f"{users[place]} and {rank}; move model and guide to cuda:N first, N the LOCAL_RANK of the environment"
            )
        users[place] = rank


@contextmanager
def _answered() -> Iterator[None]:
    """What torch raises where another process does not answer, in words."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "fit: another process of this training has ended, or has not answered for "
            f"{TIMEOUT.total_seconds() / 60:g} minutes; see what it has printed, and start all of them again. "
            f"torch says: {str(error).partition(chr(10))[0]}"
        ) from error


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors by device and dtype, which can be sent as one."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _reraise(failure: Exception | None) -> Sequence[float]:
    if failure is not None:
        raise failure
    return ()


def _report(failure: Exception) -> tuple[str, str]:
    """An error in words: the name of the first of its classes that every process knows, and its text."""
    kind = next(kind for kind in type(failure).__mro__ if kind.__module__ == "builtins")
    return kind.__name__, str(failure) if kind is type(failure) else f"{type(failure).__name__}: {failure}"


def _error(name: str, text: str) -> Exception:
    try:
        error: Exception = getattr(builtins, name)(text)
    except TypeError:  # A class that is made of more than a text.
        return RuntimeError(text)
    return error
