# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One graph: recorded from a function, with every tensor that it reads as an input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_radial._pyro.capturing import capturing
from pyro_radial._pyro.compat import record_graph
from pyro_radial.infer.compiled.structure import Slot

__all__ = ["Graph", "UncapturableError", "record", "user_line"]


class UncapturableError(Exception):
    """A program that is no one graph, and why."""


@dataclass
class Graph:
    """A recorded function.

    :param GraphModule module: takes ``[*constants, *inputs]``.
    :param constants: the tensors that the function read without their being inputs: in which slot, or themselves.
    :param Any static: what the function returned besides tensors.
    """

    module: GraphModule
    constants: list[Slot | Tensor]
    static: Any
    seen: list[Tensor] = field(default_factory=list)

    def constant_tensors(self) -> list[Tensor]:
        """The constants as they are now."""
        return [constant.tensor if isinstance(constant, Slot) else constant for constant in self.constants]

    def fits(self) -> bool:
        """Whether the constants still have the shapes, strides, dtypes and devices that they had."""
        for place, (constant, seen) in enumerate(zip(self.constants, self.seen, strict=True)):
            if isinstance(constant, Slot):
                tensor = constant.holder.get(constant.key)
                if tensor is seen:
                    continue
                if tensor is None or described(tensor) != described(seen):
                    return False
                self.seen[place] = tensor
        return True

    def holds_as_much_as(self, other: "Graph") -> bool:
        """Whether the constants of both are equal."""
        pairs = zip(self.constant_tensors(), other.constant_tensors(), strict=True)
        return all(a is b or (described(a) == described(b) and torch.equal(a, b)) for a, b in pairs)


def described(tensor: Tensor) -> tuple[Any, ...]:
    """What compiled code is made for."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def record(
    function: Callable[..., tuple[list[Tensor], Any]], inputs: Sequence[Tensor], slots: Sequence[Slot], live: set[int]
) -> Graph:
    """Record a function's tensor operations, by running it.

    :param function: from tensors to tensors, and anything else that is the same in each run.
    :param inputs: its arguments.
    :param slots: where tensors are that may be replaced by others.
    :param live: by ``id``, the tensors whose values may change.
    :raises UncapturableError: if a value is read on the host, or shapes depend on values.
    """
    static: list[Any] = []

    def tensors_alone(*tensors: Tensor) -> list[Tensor]:
        outputs, rest = function(*tensors)
        static.append(rest)
        return outputs

    with capturing(), pyro.validation_enabled(False), _HostReads(live):
        module = record_graph(tensors_alone, inputs)
    _check_shapes(module)
    place = {id(slot.tensor): slot for slot in reversed(slots)}
    constants = [place.get(id(tensor), tensor) for tensor in _lift_constants(module)]
    graph = Graph(module, constants, static[-1])
    graph.seen = graph.constant_tensors()
    return graph


class _HostReads(TorchDispatchMode):
    """Refuses to read a tensor that may have another value later; that computed ones are read, recording notices."""

    def __init__(self, live: set[int]) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and id(args[0]) in self.live:
            raise RuntimeError("data-dependent: a value of a tensor is read")
        return func(*args, **(kwargs or {}))


def _check_shapes(module: GraphModule) -> None:
    """Refuse operations whose results have a shape that depends on values, which a graph would keep as it was."""
    for node in module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        indexes = node.target is torch.ops.aten.index.Tensor
        dynamic = torch.Tag.dynamic_output_shape in tags and not (indexes and not _has_mask(node))
        if dynamic or torch.Tag.data_dependent_output in tags:
            raise UncapturableError(f"the operation {node.target} has a shape that depends on values")


def _has_mask(node: Any) -> bool:
    """Whether a tensor is indexed by a mask, and not by places."""
    return any(index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8) for index in node.args[1])


def _lift_constants(module: GraphModule) -> list[Tensor]:
    """Make the tensors that a graph holds its first inputs, each once."""
    graph = module.graph
    first = next(iter(graph.nodes))
    lifted: dict[int, Any] = {}
    tensors: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise UncapturableError(f"the graph holds a {type(value).__name__}")
        if id(value) not in lifted:
            with graph.inserting_before(first):
                lifted[id(value)] = graph.placeholder(f"constant_{len(tensors)}")
            tensors.append(value)
        node.replace_all_uses_with(lifted[id(value)])
        graph.erase_node(node)
    module.recompile()
    for name in [name for name in (*module._parameters, *module._buffers) if "_constant" in name]:
        delattr(module, name)
    return tensors


def user_line(error: BaseException | None, libraries: Sequence[str]) -> str | None:
    """The line of the user's own file where an error, or what caused it, came from.

    :param libraries: folders whose files are not the user's.
    """
    found = None
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            filename = traceback.tb_frame.f_code.co_filename
            if not filename.startswith("<") and not any(filename.startswith(folder) for folder in libraries):
                found = f"{Path(filename).name}, line {traceback.tb_lineno}"
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__
    return found
