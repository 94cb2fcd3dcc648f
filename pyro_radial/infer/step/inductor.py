# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compiled code for recorded graphs, with random numbers as inputs, checked against the graph."""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.compat import CompilerMissingError, compile_graph
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.step.noise import split_noise
from pyro_radial.infer.step.program_state import metadata_of
from pyro_radial.infer.step.tensor_graph import ChangedTensors, Graph, restore_tensors

# Torch's own random numbers: inductor's are several times slower on a CPU, and differ from those of an eager step.
# Instructions that torch itself uses need no trial by a compiler, which takes seconds.
OPTIONS = {
    "fallback_random": True,
    "cpp.vec_isa_ok": torch.backends.cpu.get_cpu_capability().startswith("AVX") or None,
}
CACHE_SIZE = 64

# The largest error of compiled code, relative to the norm of a result or to a share of the largest norm.
MOST_ROUNDING = 0.01
SMALL = 1e-3

#: Settings of inductor by name.
Options = Mapping[str, Any]
GraphFunction = Callable[..., Sequence[Tensor]]

_code_by_key: dict[Hashable, GraphFunction] = {}


@one_at_a_time()
def compile_once(graph: Graph, inputs: Sequence[Tensor], options: Options) -> GraphFunction:
    """Return checked, compiled code for a graph, perhaps made for an equal one.

    Without a compiler, and where the compiled numbers are wrong, the graph itself is returned. The last 64 are kept.
    """
    key = _key(graph, inputs, options)
    if key not in _code_by_key:
        size = f"{len(graph.module.graph.nodes):,}"
        # It takes seconds or minutes, so a terminal says what the wait is for.
        bar = tqdm(
            total=1, desc=f"compiling a graph of {size} operations", leave=False, disable=None
        )
        try:
            _code_by_key[key] = _compile_and_check(graph, inputs, {**OPTIONS, **options})
        except CompilerMissingError as error:
            warnings.warn(
                f"no compiler on this machine, so graphs run as recorded: {error}", stacklevel=2
            )
            _code_by_key[key] = graph.module
        finally:
            bar.close()
        if len(_code_by_key) > CACHE_SIZE:
            del _code_by_key[next(iter(_code_by_key))]
    return _code_by_key[key]


def has_code(graph: Graph, inputs: Sequence[Tensor], options: Options) -> bool:
    """Return whether :func:`compile_once` has code for such a graph."""
    return _key(graph, inputs, options) in _code_by_key


def forget() -> None:
    """Drop all compiled code."""
    _code_by_key.clear()


@torch.no_grad()
def _compile_and_check(graph: Graph, inputs: Sequence[Tensor], options: Options) -> GraphFunction:
    """Compile a graph, and return code that gives the graph's results on the same noise; inductor's can be wrong."""
    tensors = [tensor.detach() for tensor in (*graph.constants, *inputs)]
    draw, module = split_noise(graph.module)
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    with torch.random.fork_rng(devices):
        tensors += draw()
    changed = ChangedTensors()

    def results(code: GraphFunction) -> list[Tensor]:
        """Return what code returns, and what it makes of the tensors that the graph changes."""
        with torch.random.fork_rng(devices):
            outputs = [tensor.clone() for tensor in (*code(*tensors), *changed.tensors())]
        restore_tensors(changed.originals)
        return outputs

    with changed, torch.random.fork_rng(devices):
        module(*tensors)
    restore_tensors(changed.originals)
    expected = results(module)
    # Without vector instructions code was right wherever it had been wrong.
    for trial_options in (options, {**options, "cpp.simdlen": 1}):
        code = compile_graph(module, tensors, trial_options)
        if agree(results(code), expected, MOST_ROUNDING):
            return lambda *tensors: code(*tensors, *draw())
    warnings.warn(
        "inductor's code gives other numbers than the graph, so the graph runs as recorded",
        stacklevel=2,
    )
    return graph.module


def agree(results: Sequence[Tensor], references: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether results differ by rounding alone; a result that is small beside the others may be rounding itself.

    :param tolerance: the largest norm of a difference, relative to that of the result.
    """
    sizes = [float(result.double().norm()) for result in references]
    least = SMALL * max(filter(math.isfinite, sizes), default=0.0)
    for a, b, size in zip(results, references, sizes, strict=True):
        equal = (a == b) | (a.isnan() & b.isnan())
        difference = float((a.double() - b.double()).masked_fill(equal, 0.0).norm())
        # A NaN is more than rounding.
        if not difference <= tolerance * max(size, least):
            return False
    return True


def _key(graph: Graph, inputs: Sequence[Tensor], options: Options) -> Hashable:
    """Return what compiled code depends on."""
    metadata = tuple(map(metadata_of, (*graph.constants, *inputs)))
    settings = sorted((name, repr(value)) for name, value in options.items())
    return graph.module.code, metadata, tuple(settings)
