# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A function of tensors recorded as a graph, and what it does to tensors besides."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import pyro
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_radial._pyro.compat import capturing, record_graph, tree_leaves
from pyro_radial.infer.compiled.state import UncapturableError

__all__ = ["ChangedTensors", "Graph", "ReplacedBuffers", "put_back", "record", "restored"]

# Besides operations, which have tags.
TO_HOST = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})


class Graph(NamedTuple):
    """A recorded function: operations on ``[*constants, *inputs]``, and what it returned besides tensors.

    The constants are the tensors that the function read besides its inputs.
    """

    module: GraphModule
    constants: list[Tensor]
    static: Any


def record(function: Callable[..., tuple[list[Tensor], Any]], inputs: Sequence[Tensor]) -> Graph:
    """Record the tensor operations of a function, which must return equal values besides tensors in each run."""
    static: list[Any] = []

    def tensors_alone(*tensors: Tensor) -> list[Tensor]:
        outputs, rest = function(*tensors)
        static.append(rest)
        return outputs

    with capturing(), pyro.validation_enabled(False), _HostReads(), _CopiesToHost():
        module = record_graph(tensors_alone, inputs)
    _check_shapes(module)
    return Graph(module, _lift_constants(module), static[-1])


class _HostReads(TorchDispatchMode):
    """Raise an error if the host reads a tensor from before; recording itself notices reads of computed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags and any(
            isinstance(arg, Tensor) and id(arg) not in self.made for arg in args
        ):
            raise RuntimeError(f"data-dependent: {func} reads the value of a tensor")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == 1:
            self.made[id(result)] = result
        return result


class _CopiesToHost(TorchFunctionMode):
    """Raise an error if a tensor is copied to the host, which no operation shows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_HOST:
            raise RuntimeError(f"data-dependent: {func.__name__} reads the value of a tensor")
        return func(*args, **(kwargs or {}))


class ChangedTensors(TorchDispatchMode):
    """Remember the values of tensors from before that operations change in the block."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _changed_by(func, args, kwargs):
            if tensor.untyped_storage()._cdata not in self._made:
                self.before.append((tensor.detach(), tensor.clone()))
        result = func(*args, **kwargs)
        # A view has the memory of an argument, and a tensor of Python numbers memory of its own.
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        self._made |= _memory(result) - _memory(given)
        return result


def _memory(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give these tensors their values back at the end of the block."""
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        put_back(values)


@torch.no_grad()
def put_back(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors their former values, the latest change first."""
    for tensor, value in reversed(values):
        tensor.copy_(value)


class ReplacedBuffers:
    """Remember the buffers that modules replace in the block, which no operation shows."""

    def __init__(self) -> None:
        # For a dict of buffers and a name: the buffer from before, and the present one.
        self._found: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def __enter__(self) -> Self:
        self._hook = register_module_buffer_registration_hook(self._replaced)
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()

    def _replaced(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        key = id(module._buffers), name
        before = self._found[key][1] if key in self._found else module._buffers.get(name)
        self._found[key] = module._buffers, before, buffer

    def put_back(self, *, write: bool = False) -> None:
        """Put the buffers from before back; ``write`` copies the present values into them, which a graph can do."""
        for (_, name), (holder, before, now) in self._found.items():
            # Not the buffers of a network that was called with those of another, and has its own again.
            if isinstance(before, Tensor) and holder.get(name) is now is not before and not before.is_meta:
                if write:
                    with torch.no_grad():
                        before.copy_(now)
                holder[name] = before


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes; kernels of batch norm change statistics without saying so."""
    changed = list(args[3:5]) if "batch_norm" in str(func) and "backward" not in str(func) else []
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _check_shapes(module: GraphModule) -> None:
    """Raise an error for operations with shapes that depend on values, which a graph would fix."""
    for node in module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        indexes = node.target is torch.ops.aten.index.Tensor
        dynamic = torch.Tag.dynamic_output_shape in tags and not (indexes and not _has_mask(node))
        if dynamic or torch.Tag.data_dependent_output in tags:
            raise UncapturableError(f"the operation {node.target} has a shape that depends on values")


def _has_mask(node: Any) -> bool:
    """Whether a tensor is indexed by a mask."""
    return any(index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8) for index in node.args[1])


def _lift_constants(module: GraphModule) -> list[Tensor]:
    """Turn the tensors in a graph into its first inputs, each once."""
    graph = module.graph
    first = next(iter(graph.nodes))
    lifted: dict[int, Any] = {}
    tensors: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise UncapturableError(f"the graph holds {type(value).__name__}")
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
