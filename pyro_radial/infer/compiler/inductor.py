# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compile recorded graphs by inductor, with random numbers as inputs, and check the code against the graph."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import CompilerMissingError, compile_graph
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.compiler.noise import split_noise
from pyro_radial.infer.compiler.state import metadata_of
from pyro_radial.infer.compiler.tensor_graph import ChangedTensors, Graph, restore_tensors

# Torch's own random numbers: inductor's are several times slower on a CPU, and differ from those of an eager step.
# Vector instructions that torch itself uses need no trial compilation, which takes seconds.
OPTIONS = {
    "fallback_random": True,
    "cpp.vec_isa_ok": torch.backends.cpu.get_cpu_capability().startswith("AVX") or None,
}
CACHE_SIZE = 64

# The largest error of compiled code, relative to the norm of a result, or to SMALL times the largest norm if that is
# larger.
MOST_ROUNDING = 0.01
SMALL = 1e-3

#: Settings of inductor by name.
Options = Mapping[str, Any]
GraphFunction = Callable[..., Sequence[Tensor]]

_code_by_key: dict[Hashable, GraphFunction] = {}


@one_at_a_time()
def compile_once(graph: Graph, inputs: Sequence[Tensor], options: Options) -> GraphFunction:
    """Return compiled code for a graph; equal graphs share one code, and a cache keeps the last 64.

    Without a compiler, and if the code computes wrong numbers, the graph itself is returned.
    """
    key = _key(graph, inputs, options)
    if key not in _code_by_key:
        size = f"{len(graph.module.graph.nodes):,}"
        # Compiling takes seconds or minutes, so a terminal shows what it waits for.
        bar = tqdm(
            total=1, desc=f"compiling a graph of {size} operations", leave=False, disable=None
        )
        try:
            _code_by_key[key] = _compile_and_check(graph, inputs, {**OPTIONS, **options})
        except CompilerMissingError as error:
            warn(f"no compiler on this machine, so graphs run as recorded: {error}")
            _code_by_key[key] = graph.module
        finally:
            bar.close()
        if len(_code_by_key) > CACHE_SIZE:
            del _code_by_key[next(iter(_code_by_key))]
    return _code_by_key[key]


def has_code(graph: Graph, inputs: Sequence[Tensor], options: Options) -> bool:
    """Return whether the cache of :func:`compile_once` has code for a graph."""
    return _key(graph, inputs, options) in _code_by_key


def forget() -> None:
    """Empty the cache of compiled code."""
    _code_by_key.clear()


@torch.no_grad()
def _compile_and_check(graph: Graph, inputs: Sequence[Tensor], options: Options) -> GraphFunction:
    """Compile a graph and compare its results with the code's on the same noise; return the graph if they differ."""
    tensors = [tensor.detach() for tensor in (*graph.constants, *inputs)]
    draw, module = split_noise(graph.module)
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices):
        tensors += draw()
    changed = ChangedTensors()

    def results(code: GraphFunction) -> list[Tensor]:
        """Run code, and return copies of its results and of the tensors that the graph changes in place."""
        with torch.random.fork_rng(devices):
            outputs = [tensor.clone() for tensor in (*code(*tensors), *changed.tensors())]
        restore_tensors(changed.originals)
        return outputs

    with changed, torch.random.fork_rng(devices):
        module(*tensors)
    restore_tensors(changed.originals)
    expected = results(module)
    # Where inductor's code was wrong so far, it was right without vector instructions.
    for trial_options in (options, {**options, "cpp.simdlen": 1}):
        code = compile_graph(module, tensors, trial_options)
        if agree(results(code), expected, MOST_ROUNDING):
            return lambda *tensors: code(*tensors, *draw())
    warn("inductor's code gives other numbers than the graph, so the graph runs as recorded")
    return graph.module


def agree(results: Sequence[Tensor], references: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether results equal their references up to rounding.

    :param tolerance: the largest norm of a difference, relative to the norm of the reference, or to a thousandth of the
        largest norm if that is larger, since a small result may consist of rounding.
    """
    sizes = [float(result.double().norm()) for result in references]
    least = SMALL * max(filter(math.isfinite, sizes), default=0.0)
    for a, b, size in zip(results, references, sizes, strict=True):
        equal = (a == b) | (a.isnan() & b.isnan())
        difference = float((a.double() - b.double()).masked_fill(equal, 0.0).norm())
        # This form is also true for NaN.
        if not difference <= tolerance * max(size, least):
            return False
    return True


def _key(graph: Graph, inputs: Sequence[Tensor], options: Options) -> Hashable:
    """Return the key of compiled code in the cache: the graph's code, properties of tensors, and settings."""
    metadata = tuple(map(metadata_of, (*graph.constants, *inputs)))
    settings = sorted((name, repr(value)) for name, value in options.items())
    return graph.module.code, metadata, tuple(settings)
