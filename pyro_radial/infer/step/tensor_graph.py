# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A function of tensors recorded as a graph, and what it does to tensors besides."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_radial._pyro.compat import (
    ReplaceFunctions,
    is_capturing,
    record_graph,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    untraced,
)
from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial._pyro.types import Args, Kwargs
from pyro_radial.infer.step.program_state import MOST_BYTES, UnrecordableError

# Besides operations, which have tags. Legacy constructors, such as torch.FloatTensor([number]), call __float__.
TO_HOST = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__repr__,
)
# These read the tensors in a list, as in torch.tensor([number, 1.0]).
CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new)
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
# A value with more bytes, that Python reads from the arguments, is no guard.
MOST_GUARDED = 64
# Stands for the arguments among the sources of a value.
ARGUMENTS = -1
LITERAL = torch.ops.aten.lift_fresh.default
LITERAL_COPY = torch.ops.aten.lift_fresh_copy.default
# These take shape, dtype and device of their first argument, and not its values.
LIKE = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_full.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros_like.default,
}

# By a dict of buffers and a name: the dict, the buffer from before, and the latest one.
Buffers = dict[tuple[int, str], tuple[dict[str, Any], Tensor | None, Tensor | None]]


class Guards(NamedTuple):
    """Values that the host read from the arguments, and how they are computed.

    The module takes ``inputs``: constants, and the numbers of arguments.
    """

    module: GraphModule
    inputs: list[Tensor | int]
    expected: list[Tensor]

    def match(self, arguments: Sequence[Tensor]) -> bool:
        """Return whether the values are the same for these arguments."""
        inputs = [arguments[entry] if isinstance(entry, int) else entry for entry in self.inputs]
        return all(map(torch.equal, self.module(*inputs), self.expected))


class Graph(NamedTuple):
    """A recorded function: operations on ``[*constants, *inputs]``, and the tree of its result.

    The constants are the tensors that the function read besides its inputs, and ``read`` has the ids of those, and of
    numbers, that the host read.
    """

    module: GraphModule
    constants: list[Tensor]
    leaves: list[object]
    tree: Any
    host_read_ids: set[int]
    guards: Guards | None

    def result(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the tree with these tensors, or with ``Tensor`` in their places."""
        remaining_tensors = repeat(Tensor) if tensors is None else iter(tensors)
        leaves = [next(remaining_tensors) if leaf is Tensor else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.tree)


def record(
    function: Callable[..., Any],
    numbers: Sequence[Tensor],
    arguments: Sequence[Tensor],
    readable: Iterable[Tensor] = (),
    changed: Iterable[Tensor] = (),
) -> Graph:
    """Record the tensor operations of a function of numbers and arguments, which returns a tree with tensors.

    :param numbers: 0-d tensors instead of Python numbers; the host may read them, except the first.
    :param arguments: the host may read small values that are computed from them; see :class:`Guards`.
    :param readable: other tensors that the host may read, except those in ``changed``.
    """
    inputs = [*numbers, *arguments]
    leaves: list[object] = []
    tree: Any = None

    def flat_results(*tensors: Tensor) -> list[Tensor]:
        nonlocal tree
        result_leaves, tree = tree_flatten(function(*tensors))
        leaves[:] = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in result_leaves]
        return [*_tensors_in(result_leaves), *reads.guarded]

    reads = _HostReads(numbers[1:], arguments, readable, changed)
    replacements: dict[Any, Callable[..., Any]] = {}
    for function_to_host in TO_HOST:
        replacements[function_to_host] = partial(reads.copy_to_host, function_to_host)
    for constructor in CONSTRUCTORS:
        replacements[constructor] = partial(reads.construct, constructor)
    copies = ReplaceFunctions(replacements)
    with pyro.validation_enabled(False), reads, copies:
        module = record_graph(flat_results, inputs)
    constants = _lift_constants(module)
    if any(constant.layout is not torch.strided for constant in constants):
        raise UnrecordableError("it uses a sparse tensor")
    guards = _split_off_guards(module, constants, len(numbers), reads.guarded)
    device = inputs[0].device if inputs else torch.device("cpu")
    if device.type != "cpu":
        constants = _fold_literals(device, module, constants)
    return Graph(module, constants, leaves, tree, reads.host_read_ids, guards)


class _HostReads(TorchDispatchMode):
    """Let the host read what comes from numbers, readable tensors and arguments; raise an error at other reads."""

    def __init__(
        self,
        numbers: Iterable[Tensor],
        arguments: Iterable[Tensor],
        readable: Iterable[Tensor],
        changed: Iterable[Tensor],
    ) -> None:
        super().__init__()
        self.host_read_ids: set[int] = set()
        #: The values that it has read from arguments.
        self.guarded: list[Tensor] = []
        # By memory: the ids of the numbers and readable tensors that its content comes from, and ``ARGUMENTS`` if it
        # comes from these; None if it comes from others too.
        self._sources: dict[int, set[int] | None] = {}
        # Other tensors must not get the memory of these.
        self._tensors_kept_alive: list[Tensor] = []
        # After the latest draw.
        self._noise = TorchNoise.now()
        for tensor in readable:
            if _is_readable(tensor):
                self._set_sources(tensor, {id(tensor)})
        for tensor in numbers:
            self._set_sources(tensor, {id(tensor)})
        for tensor in arguments:
            self._set_sources(tensor, {ARGUMENTS})
        for tensor in changed:
            self._set_sources(tensor, None)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_capturing():
            return func(*args, **kwargs)
        shape = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            indices: list[Tensor | None] = []
            for index in args[1]:
                indices += self._index_tensors(index)
            args = args[0], indices
        elif shape or torch.Tag.data_dependent_output in func.tags:
            with untraced():
                result = func(*args, **kwargs)
            traced = func(*args, **kwargs) if shape else (args, kwargs)
            self.note_read((args, kwargs), SHAPE_READ if shape else VALUE_READ, traced)
            return result
        read = args[1:] if func in LIKE else args
        sources = set() if func is LITERAL else self._find_sources((read, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            sources = None
            self._check_noise()
        changed = _changed_by(func, args, kwargs)
        result = func(*args, **kwargs)
        if draws:
            self._noise = TorchNoise.now()
        for tensor in (*changed, *_tensors_in(result)):
            self._set_sources(tensor, sources)
        return result

    def _check_noise(self) -> None:
        """Raise an error if the state of a generator is not that after the latest draw."""
        noise = TorchNoise.now()
        if not all(
            map(torch.equal, (noise.cpu, *noise.cuda), (self._noise.cpu, *self._noise.cuda))
        ):
            raise UnrecordableError(SEEDED)

    def note_read(self, tree: object, reason: str = VALUE_READ, values: object = None) -> None:
        """Note that the host reads tensors, or raise an error.

        :param values: what it reads of them; by default all.
        """
        sources = self._find_sources(tree)
        if sources is None:
            raise UnrecordableError(reason)
        if ARGUMENTS in sources:
            tensors = _tensors_in(tree if values is None else values)
            if sum(tensor.nbytes for tensor in tensors) > MOST_GUARDED:
                raise UnrecordableError(reason)
            # Copies, because the program may change them.
            self.guarded += map(torch.ops.aten.clone.default, tensors)
        self.host_read_ids |= sources - {ARGUMENTS}

    def copy_to_host(
        self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Copy a tensor to the host, which no operation shows."""
        self.note_read(tensor)
        with untraced():
            return function(tensor, *args, **kwargs)

    def construct(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of a list, whose tensors no operation shows."""
        self.note_read([argument for argument in args if isinstance(argument, list | tuple)])
        return function(*args, **kwargs)

    def _index_tensors(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return an index, or the places of a mask, which have a shape of their own."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        self.note_read(index, SHAPE_READ)
        with untraced():
            return index.nonzero().unbind(1)

    def _find_sources(self, tree: object) -> set[int] | None:
        """Return what the values of the tensors in a tree come from; None if they come from anything else too."""
        sources_of_all: set[int] = set()
        for tensor in _tensors_in(tree):
            sources = self._sources.get(_memory(tensor))
            if sources is None:
                return None
            sources_of_all |= sources
        return sources_of_all

    def _set_sources(self, tensor: Tensor, sources: set[int] | None) -> None:
        """Note what the value of a tensor comes from."""
        self._sources[_memory(tensor)] = sources
        if sources is not None:
            self._tensors_kept_alive.append(tensor)


class ChangedTensors(TorchDispatchMode):
    """Remember the values of tensors from before that operations change in the block."""

    def __init__(self) -> None:
        super().__init__()
        self._new_memory: set[int] = set()
        #: Each tensor before a change of it, with a copy.
        self.originals: list[tuple[Tensor, Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations have changed, one for each change."""
        return [tensor for tensor, _ in self.originals]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _changed_by(func, args, kwargs):
            if _memory(tensor) not in self._new_memory:
                self.originals.append((tensor.detach(), tensor.clone()))
        result = func(*args, **kwargs)
        # A view has the memory of an argument, and a tensor of Python numbers memory of its own.
        inputs = () if func is LITERAL else (args, kwargs)
        self._new_memory |= {*map(_memory, _tensors_in(result))} - {
            *map(_memory, _tensors_in(inputs))
        }
        return result


def _tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_readable(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor: a small one in its memory that is not trained."""
    # A class of its own may refuse that its attributes are read.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    in_host_memory = tensor.device.type == "cpu" and tensor.nbytes <= MOST_BYTES
    return in_host_memory and not tensor.requires_grad


def _memory(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share."""
    # Sparse tensors have several memories.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


@contextmanager
def restore_after(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give these tensors their values back at the end of the block."""
    originals = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        restore_tensors(originals)


@torch.no_grad()
def restore_tensors(originals: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors their former values, the latest change first."""
    for tensor, original in reversed(originals):
        tensor.copy_(original)


@contextmanager
def note_replaced_buffers() -> Iterator[Buffers]:
    """Find the buffers that modules replace in the block, which no operation shows."""
    replaced_buffers: Buffers = {}

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        holder = module._buffers
        key = id(holder), name
        previous = replaced_buffers[key][1] if key in replaced_buffers else holder.get(name)
        replaced_buffers[key] = holder, previous, buffer

    hook = register_module_buffer_registration_hook(note)
    try:
        yield replaced_buffers
    finally:
        hook.remove()


@torch.no_grad()
def restore_buffers(buffers: Buffers, *, write: bool = False) -> None:
    """Put the buffers from before back; ``write`` copies the present values into them, which a graph can do."""
    for (_, name), (holder, previous, latest) in buffers.items():
        if not isinstance(previous, Tensor) or previous.is_meta:
            continue
        # A network that was called with the buffers of another has its own again.
        if latest is not previous and holder.get(name) is latest:
            if write:
                previous.copy_(holder[name])
            holder[name] = previous


def _changed_by(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an operation changes; kernels of batch norm change statistics without saying so."""
    changed: list[object] = []
    if "batch_norm" in str(func) and "backward" not in str(func):
        changed += args[3:5]
    if func._schema.is_mutable:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(
                    args[position] if position < len(args) else kwargs.get(argument.name)
                )
    return _tensors_in(changed)


def _split_off_guards(
    module: GraphModule, constants: Sequence[Tensor], num_numbers: int, expected: Sequence[Tensor]
) -> Guards | None:
    """Move the last results of a graph of constants, numbers and arguments to :class:`Guards`."""
    if not expected:
        return None
    guards = copy.deepcopy(module)
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    output.args = (results[: -len(expected)],)
    guarded = results[-len(expected) :]
    # Constructors such as torch.FloatTensor([number]) hide what they read.
    if any(node.op == "placeholder" for node in guarded):
        raise UnrecordableError(VALUE_READ)
    for node in guarded:
        module.graph.erase_node(node)
    module.recompile()
    (output,) = guards.graph.find_nodes(op="output")
    output.args = (output.args[0][-len(expected) :],)
    # Draws and changes of tensors are left to the graph of the loss.
    guards.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    inputs: list[Tensor | int] = []
    for position, node in enumerate(guards.graph.find_nodes(op="placeholder")):
        if node.users:
            argument = position - len(constants) - num_numbers
            inputs.append(constants[position] if argument < 0 else argument)
        else:
            guards.graph.erase_node(node)
    guards.recompile()
    values = [value.detach().clone() for value in expected]
    return Guards(guards, inputs, values)


def _lift_constants(module: GraphModule) -> list[Tensor]:
    """Turn the tensors in a graph into its first inputs, each once."""
    graph = module.graph
    first_node = next(iter(graph.nodes))
    lifted: dict[int, Node] = {}
    tensors: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, node.target)
        if not isinstance(value, Tensor):
            raise UnrecordableError(f"the graph holds {type(value).__name__}")
        if id(value) not in lifted:
            with graph.inserting_before(first_node):
                lifted[id(value)] = graph.placeholder(f"constant_{len(tensors)}")
            tensors.append(value)
        node.replace_all_uses_with(lifted[id(value)])
        graph.erase_node(node)
    module.recompile()
    for name in (*module._parameters, *module._buffers):
        if "_constant" in name:
            delattr(module, name)
    return tensors


def _fold_literals(
    device: torch.device, module: GraphModule, constants: list[Tensor]
) -> list[Tensor]:
    """Compute once what depends on literals in host memory alone, and put it on a device, so that no step copies it.

    :returns: the constants of the changed graph.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    inputs_of_constants = graph.find_nodes(op="placeholder")[: len(constants)]
    # The tensors that are still inputs, and those that are known from literals alone.
    constant_nodes: dict[Node, Tensor] = {}
    folded: dict[Node, Tensor] = {}
    for node, tensor in zip(inputs_of_constants, constants, strict=True):
        if tensor.device.type == "cpu" and all(user.target is LITERAL_COPY for user in node.users):
            folded[node] = tensor
        else:
            constant_nodes[node] = tensor
    for node in graph.nodes:
        inputs = node.all_input_nodes
        computes = node.op == "call_function" and bool(inputs) and _is_pure(node)
        if computes and folded.keys() >= set(inputs):
            args, kwargs = map_arg((node.args, node.kwargs), folded.__getitem__)
            folded[node] = node.target(*args, **kwargs)
    for node in list(folded):
        remaining_users = [user for user in node.users if user not in folded]
        if remaining_users:
            with graph.inserting_before(inputs_of_constants[0]):
                literal_node = graph.placeholder(f"literal_{len(constant_nodes)}")
            for user in remaining_users:
                user.replace_input_with(node, literal_node)
            constant_nodes[literal_node] = (
                folded[node].to(device) if folded[node].dim() == 0 else folded[node]
            )
    for node in reversed(list(folded)):
        graph.erase_node(node)
    module.recompile()
    return [constant_nodes[node] for node in graph.nodes if node in constant_nodes]


def _is_pure(node: Node) -> bool:
    """Return whether a node only computes, and nothing writes into its result."""
    for operation in (node, *node.users):
        schema = getattr(operation.target, "_schema", None)
        if schema is None or schema.is_mutable:
            return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
