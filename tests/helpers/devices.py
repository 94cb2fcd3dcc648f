# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compilers and devices: what tests ask of them, and a stand-in for a device with graphs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_radial._pyro.compat import tree_leaves
from pyro_radial.infer.compiler import cache, inductor

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

recent_compiler = pytest.mark.skipif(
    VERSION < (2, 13), reason="torch.compile and torch.export are tested with torch 2.13; that of 2.7 follows less"
)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise an error where the host waits for the device."""
    # Torch warns that it does not find every wait.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class CountHostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in READS
        return func(*args, **(kwargs or {}))


class CalledAgain:
    """As with a CUDA graph, a capture does nothing yet, and each replay writes its results into the same memory."""

    def __init__(self):
        self.captures = 0

    def warm_up(self, body):
        return body()

    def capture(self, body):
        self.captures += 1
        memory = None

        def replay():
            nonlocal memory
            results = body()
            if memory is None:
                memory = results
            for tensor, value in zip(tree_leaves(memory), tree_leaves(results), strict=True):
                if isinstance(tensor, torch.Tensor) and tensor is not value:
                    tensor.copy_(value)
            return memory

        return replay


def capture_on_cpu(monkeypatch):
    """Let all graphs capture by a stand-in, and run as recorded instead of compiled; returns the stand-in."""
    device = CalledAgain()
    monkeypatch.setattr(cache, "device_graphs", lambda _: device)
    monkeypatch.setattr(inductor, "compile_graph", lambda module, *_: module)
    monkeypatch.setattr(inductor, "_code_by_key", {})
    return device
