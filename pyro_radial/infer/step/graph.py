# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A function of tensors recorded as a graph, and what it does to tensors besides."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_radial._pyro.compat import (
    Replaced,
    record_graph,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    untraced,
)
from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial.infer.step.state import MOST_BYTES, UncapturableError

# Besides operations, which have tags.
TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
VALUE_READ = (
    "Python reads the value of a tensor that the model or the guide computes; "
    "use operations such as torch.where"
)
SEEDED = (
    "it sets the state of torch's generator, as torch.manual_seed does, and checkpointing with "
    "dropout; a graph draws other noise then"
)
SHAPE_READ = (
    "a tensor has a shape that depends on values; use torch.where, or mask what does not count"
)
LITERAL = torch.ops.aten.lift_fresh.default
LITERAL_COPY = torch.ops.aten.lift_fresh_copy.default

# By a dict of buffers and a name: the dict, the buffer from before, and the latest one.
Buffers = dict[tuple[int, str], tuple[dict[str, Any], Any, Any]]


class Graph(NamedTuple):
    """A recorded function: operations on ``[*constants, *inputs]``, and the tree of its result.

    The constants are the tensors that the function read besides its inputs, and ``read`` has the ids of those that the
    host read.
    """

    module: GraphModule
    constants: list[Tensor]
    leaves: list[Any]
    tree: Any
    read: set[int]

    def result(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """The tree with these tensors, or with ``Tensor`` in their places."""
        found = repeat(Tensor) if tensors is None else iter(tensors)
        return tree_unflatten(
            [next(found) if leaf is Tensor else leaf for leaf in self.leaves], self.tree
        )


def record(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    readable: Iterable[Tensor] = (),
    changed: Iterable[Tensor] = (),
) -> Graph:
    """Record the tensor operations of a function, which returns a tree with tensors.

    :param readable: tensors that the host may read, except those in ``changed``.
    """
    leaves: list[Any] = []
    tree: Any = None

    def tensors_alone(*tensors: Tensor) -> list[Tensor]:
        nonlocal tree
        found, tree = tree_flatten(function(*tensors))
        leaves[:] = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in found]
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    reads = _HostReads(readable, (*inputs, *changed))
    copies = Replaced({function: partial(reads.copied, function) for function in TO_HOST})
    with pyro.validation_enabled(False), reads, copies:
        module = record_graph(tensors_alone, inputs)
    constants = _lift_constants(module)
    if any(constant.layout is not torch.strided for constant in constants):
        raise UncapturableError("it uses a sparse tensor")
    device = inputs[0].device if inputs else torch.device("cpu")
    if device.type != "cpu":
        constants = _with_literals_on(device, module, constants)
    return Graph(module, constants, leaves, tree, reads.read)


class _HostReads(TorchDispatchMode):
    """Let the host read what comes from Python numbers and readable tensors alone; raise an error at other reads."""

    def __init__(self, readable: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        super().__init__()
        self.read: set[int] = set()
        # By memory: the ids of the readable tensors that its content comes from; None if it comes from others too.
        self._sources: dict[int, set[int] | None] = {}
        # Other tensors must not get the memory of these.
        self._known: list[Tensor] = []
        # After the latest draw.
        self._noise = TorchNoise.now()
        for tensor in readable:
            # A class of its own may refuse that its attributes are read.
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if (
                plain
                and not tensor.requires_grad
                and tensor.device.type == "cpu"
                and tensor.nbytes <= MOST_BYTES
            ):
                self._note(tensor, {id(tensor)})
        for tensor in others:
            self._note(tensor, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shape = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            args = args[0], [number for index in args[1] for number in self._numbers(index)]
        elif shape or torch.Tag.data_dependent_output in func.tags:
            self.reads((args, kwargs), SHAPE_READ if shape else VALUE_READ)
            with untraced():
                return func(*args, **kwargs)
        sources = set() if func is LITERAL else self._sources_of((args, kwargs))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded:
            sources = None
            now = TorchNoise.now()
            same = map(torch.equal, (now.cpu, *now.cuda), (self._noise.cpu, *self._noise.cuda))
            if not all(same):
                raise UncapturableError(SEEDED)
        changed = _changed_by(func, args, kwargs)
        result = func(*args, **kwargs)
        self._noise = TorchNoise.now() if seeded else self._noise
        for tensor in (*changed, *_tensors(result)):
            self._note(tensor, sources)
        return result

    def reads(self, tree: Any, reason: str = VALUE_READ) -> None:
        """Note that the host reads tensors, or raise an error."""
        sources = self._sources_of(tree)
        if sources is None:
            raise UncapturableError(reason)
        self.read |= sources

    def copied(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Copy a tensor to the host, which no operation shows."""
        self.reads(tensor)
        with untraced():
            return function(tensor, *args, **kwargs)

    def _numbers(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """An index, or the places of a mask, which have a shape of their own."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        self.reads(index, SHAPE_READ)
        with untraced():
            return index.nonzero().unbind(1)

    def _sources_of(self, tree: Any) -> set[int] | None:
        found = [self._sources.get(_memory(tensor)) for tensor in _tensors(tree)]
        return None if None in found else set[int]().union(*(ids for ids in found if ids))

    def _note(self, tensor: Tensor, sources: set[int] | None) -> None:
        self._sources[_memory(tensor)] = sources
        if sources is not None:
            self._known.append(tensor)


class ChangedTensors(TorchDispatchMode):
    """Remember the values of tensors from before that operations change in the block."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _changed_by(func, args, kwargs):
            if _memory(tensor) not in self._made:
                self.before.append((tensor.detach(), tensor.clone()))
        result = func(*args, **kwargs)
        # A view has the memory of an argument, and a tensor of Python numbers memory of its own.
        given = () if func is LITERAL else (args, kwargs)
        self._made |= {*map(_memory, _tensors(result))} - {*map(_memory, _tensors(given))}
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    # Sparse tensors have several memories.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


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


@contextmanager
def replaced_buffers() -> Iterator[Buffers]:
    """Find the buffers that modules replace in the block, which no operation shows."""
    found: Buffers = {}

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        holder, key = module._buffers, (id(module._buffers), name)
        found[key] = holder, found[key][1] if key in found else holder.get(name), buffer

    hook = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        hook.remove()


@torch.no_grad()
def put_buffers_back(buffers: Buffers, *, write: bool = False) -> None:
    """Put the buffers from before back; ``write`` copies the present values into them, which a graph can do."""
    for (_, name), (holder, before, now) in buffers.items():
        # A network that was called with the buffers of another has its own again.
        if (
            isinstance(before, Tensor)
            and holder.get(name) is now is not before
            and not before.is_meta
        ):
            if write:
                before.copy_(holder[name])
            holder[name] = before


def _changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation changes; kernels of batch norm change statistics without saying so."""
    changed = list(args[3:5]) if "batch_norm" in str(func) and "backward" not in str(func) else []
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return _tensors(changed)


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


def _with_literals_on(
    device: torch.device, module: GraphModule, constants: list[Tensor]
) -> list[Tensor]:
    """Compute once what depends on literals in host memory alone, and put it on a device, so that no step copies it.

    :returns: the constants of the changed graph.
    """
    graph, kept = module.graph, dict[Node, Tensor]()
    graph.eliminate_dead_code()
    places = [node for node in graph.nodes if node.op == "placeholder"][: len(constants)]
    known = dict[Node, Tensor]()
    for node, tensor in zip(places, constants, strict=True):
        if tensor.device.type == "cpu" and all(user.target is LITERAL_COPY for user in node.users):
            known[node] = tensor
        else:
            kept[node] = tensor
    for node in graph.nodes:
        found = node.op == "call_function" and bool(node.all_input_nodes) and _is_pure(node)
        if found and all(argument in known for argument in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    for node in list(known):
        others = [user for user in node.users if user not in known]
        if others:
            with graph.inserting_before(places[0]):
                place = graph.placeholder(f"literal_{len(kept)}")
            for user in others:
                user.replace_input_with(node, place)
            kept[place] = known[node].to(device) if known[node].dim() == 0 else known[node]
    for node in reversed(list(known)):
        graph.erase_node(node)
    module.recompile()
    return [kept[node] for node in graph.nodes if node in kept]


def _is_pure(node: Node) -> bool:
    """Whether a node only computes, and nothing writes into its result."""
    targets: list[Any] = [node.target, *(user.target for user in node.users)]
    if any(
        getattr(target, "_schema", None) is None or target._schema.is_mutable for target in targets
    ):
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
