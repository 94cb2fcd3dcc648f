# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compiled code for recorded graphs, one for all graphs that are alike."""

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.compat import CompilerMissingError, compile_graph
from pyro_radial.infer.compiled.graph import Graph, described

__all__ = ["compiled", "forget", "is_compiled"]

# Of torch's own random numbers: inductor's are several times slower on a CPU, and none that an eager step would draw.
OPTIONS = {"fallback_random": True}

MOST_KEPT = 64

Code = Callable[..., Sequence[Tensor]]

_lock = threading.RLock()
_kept: OrderedDict[Any, Code] = OrderedDict()
_warned = False


def is_compiled(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> bool:
    """Whether there is compiled code for a graph like this one."""
    return _key(graph, inputs, options) in _kept


def compiled(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Code:
    """Compiled code for a graph, made now or for another like it; without a compiler the graph itself.

    :param Graph graph: a graph.
    :param inputs: its inputs, after the constants.
    :param options: settings of inductor.
    """
    global _warned
    key = _key(graph, inputs, options)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
        try:
            with torch.no_grad():
                examples = [t.detach() for t in (*graph.constant_tensors(), *inputs)]
                _kept[key] = compile_graph(graph.module, examples, {**OPTIONS, **options})
        except CompilerMissingError as error:
            if not _warned:
                warnings.warn(
                    f"CompiledSVI: no compiler on this machine, so graphs run as recorded: {error}", stacklevel=2
                )
                _warned = True
            return graph.module
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
        return _kept[key]


def forget() -> None:
    """Let all compiled code go."""
    _kept.clear()


def _key(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    metadata = tuple(described(tensor) for tensor in (*graph.constant_tensors(), *inputs))
    return graph.module.code, metadata, tuple(sorted((name, repr(value)) for name, value in options.items()))
