# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compile recorded graphs by inductor, with random numbers as inputs, and check the code against the graph."""

import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import CompilerMissingError, compile_graph, tree_map_only
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Args, Kwargs
from pyro_radial.infer.compiler.noise import Draw, split_noise
from pyro_radial.infer.compiler.state import metadata_of
from pyro_radial.infer.compiler.tensor_graph import ChangedTensors, Graph, restore_tensors

# Torch's own random numbers: inductor's are several times slower on a CPU, and differ from those of an eager step.
# Vector instructions that torch itself uses need no trial compilation, which takes seconds.
OPTIONS = {
    "fallback_random": True,
    "cpp.vec_isa_ok": torch.backends.cpu.get_cpu_capability().startswith("AVX") or None,
}
# On a CPU convolutions keep the order of memory that their inputs have. With inductor's own choice, channels last, a
# step of a LeNet on images in the usual order took 1.5 times as long.
CPU_OPTIONS = {**OPTIONS, "layout_optimization": False}

CACHE_SIZE = 64

# The largest error of compiled code, relative to the norm of a result, or to SMALL times the largest norm if that is
# larger.
MOST_ROUNDING = 0.01
SMALL = 1e-3
# Gradients of a deep network can change by more, because rounding moves a unit over the edge of a ReLU. So code may
# also be off by so many times what rounding changes in the graph itself, but never by more than MOST_ERROR.
TIMES_ROUNDING, MOST_ERROR = 3.0, 0.3
# Code is slow if it takes this many times as long as its graph, in the fastest of so many runs. Large graphs have one
# run, so that no step stands out.
MOST_SLOWER, TIMED_RUNS, MOST_SECONDS = 1.5, 5, 0.1
#: Why code is not used.
WRONG = "inductor's code gives other numbers than the graph"
SLOW = "inductor's code takes longer than the graph"

#: Settings of inductor by name.
Options = Mapping[str, Any]
GraphFunction = Callable[..., Sequence[Tensor]]

_code_by_key: dict[Hashable, GraphFunction | None] = {}


@one_at_a_time()
def compile_at_once(graph: Graph, inputs: Sequence[Tensor], options: Options) -> GraphFunction:
    """Return compiled code for a graph; equal graphs share one code, and a cache keeps the last 64.

    Without a compiler, and if the code computes wrong numbers, the graph itself is returned.
    """
    draw, module = split_noise(graph.module)
    tensors = draw_noise((*graph.constants, *inputs), draw)
    key = graph.module.code, tuple(map(metadata_of, tensors)), repr(sorted(options.items()))
    if key not in _code_by_key:
        _code_by_key[key] = _compile(module, tensors, options)
        if len(_code_by_key) > CACHE_SIZE:
            del _code_by_key[next(iter(_code_by_key))]
    code = _code_by_key[key]
    return graph.module if code is None else lambda *tensors: code(*tensors, *draw())


def _compile(
    module: GraphModule, tensors: Sequence[Tensor], options: Options
) -> GraphFunction | None:
    """Return compiled code for a graph without noise, or None after a warning if there is none that is right."""
    size = f"{len(module.graph.nodes):,}"
    # Compiling takes seconds or minutes, so a terminal shows what it waits for.
    with tqdm(total=1, desc=f"compiling a graph of {size} operations", leave=False, disable=None):
        try:
            for trial in trial_options(options, tensors):
                code = compile_graph(module, tensors, trial)
                if find_fault(code, module, tensors) is None:
                    return code
        except CompilerMissingError as error:
            warn(f"no compiler on this machine, so graphs run as recorded: {error}")
            return None
    warn(f"{WRONG}, so the graph runs as recorded")
    return None


def trial_options(options: Options, tensors: Sequence[Tensor]) -> list[Options]:
    """Return the settings to try, in turn: where inductor's code was wrong, it was right without vectors.

    :param options: a user's settings.
    :param tensors: what the code will take.
    """
    options = {**(OPTIONS if _devices(tensors) else CPU_OPTIONS), **options}
    return [options, {**options, "cpp.simdlen": 1}]


def draw_noise(tensors: Sequence[Tensor], draw: Draw) -> list[Tensor]:
    """Return the tensors that a graph takes, and then its noise; the generators keep their states."""
    with torch.random.fork_rng(_devices(tensors)):
        return [*(tensor.detach() for tensor in tensors), *draw()]


@torch.no_grad()
def find_fault(
    code: GraphFunction, module: GraphModule, tensors: Sequence[Tensor], *, timed: bool = False
) -> str | None:
    """Return ``WRONG`` if results or changes of tensors differ from the graph's by more than rounding, else None.

    :param timed: whether to return ``SLOW`` for right code that takes longer than the graph on a CPU.
    """
    changed = ChangedTensors()

    def values_of(function: GraphFunction, mode: AbstractContextManager[Any]) -> list[Tensor]:
        with torch.random.fork_rng(_devices(tensors)), mode:
            outputs = function(*tensors)
        values = [tensor.clone() for tensor in (*outputs, *changed.tensors())]
        restore_tensors(changed.originals)
        return values

    expected = values_of(module, changed)
    error = relative_difference(values_of(code, nullcontext()), expected)
    if error > MOST_ROUNDING:
        rounded = (values_of(module, OtherRounding(direction)) for direction in (1.0, -1.0))
        rounding = max(relative_difference(values, expected) for values in rounded)
        if error > min(TIMES_ROUNDING * rounding, MOST_ERROR):
            return WRONG
    return SLOW if timed and _is_slow(code, module, tensors, changed.originals) else None


class OtherRounding(TorchDispatchMode):
    """Change each number that an operation computes by at most a unit of rounding, at random.

    :param direction: 1, or -1 for the opposite change of each.
    """

    def __init__(self, direction: float) -> None:
        super().__init__()
        self._direction = direction

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run an operation, and change its results unless they share the memory of its arguments."""
        result = func(*args, **(kwargs or {}))
        is_shared = any(value.alias_info is not None for value in func._schema.returns)
        return result if is_shared else tree_map_only(Tensor, self._rounded, result)

    def _rounded(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        unit = self._direction * torch.finfo(tensor.dtype).eps
        return tensor * (1.0 + unit * (2.0 * torch.rand_like(tensor) - 1.0))


def _is_slow(
    code: GraphFunction,
    module: GraphModule,
    tensors: Sequence[Tensor],
    originals: Sequence[tuple[Tensor, Tensor]],
) -> bool:
    """Return whether code takes longer than its graph; ``originals`` restore what a run changes."""
    if _devices(tensors):
        return False
    fastest: dict[GraphFunction, float] = {module: math.inf, code: math.inf}
    begin = time.perf_counter()
    for _ in range(TIMED_RUNS):
        for function in fastest:
            start = time.perf_counter()
            function(*tensors)
            fastest[function] = min(fastest[function], time.perf_counter() - start)
            restore_tensors(originals)
        if time.perf_counter() - begin > MOST_SECONDS:
            break
    return fastest[code] > MOST_SLOWER * fastest[module]


def _devices(tensors: Sequence[Tensor]) -> set[int]:
    """Return the GPUs of tensors, whose generators are to be restored."""
    return {tensor.get_device() for tensor in tensors if tensor.is_cuda}


def relative_difference(results: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Return the largest norm of a difference, relative to the norm of its reference; infinite if one is not a number.

    A small result may consist of rounding, so its difference is relative to a thousandth of the largest norm.
    """
    sizes = [float(result.double().norm()) for result in references]
    least = max(SMALL * max(filter(math.isfinite, sizes), default=0.0), sys.float_info.min)
    largest = 0.0
    for a, b, size in zip(results, references, sizes, strict=True):
        equal = (a == b) | (a.isnan() & b.isnan())
        difference = float((a.double() - b.double()).masked_fill(equal, 0.0).norm())
        if math.isnan(difference) or math.isnan(size):
            return math.inf
        largest = max(largest, difference / max(size, least))
    return largest
