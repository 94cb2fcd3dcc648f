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
from pyro_radial.infer.step.program_state import MOST_BYTES, UncapturableError

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

    def hold(self, arguments: Sequence[Tensor]) -> bool:
        """Return whether the values are the same for these arguments."""
        inputs = [arguments[place] if isinstance(place, int) else place for place in self.inputs]
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
    read: set[int]
    guards: Guards | None

    def result(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the tree with these tensors, or with ``Tensor`` in their places."""
        found = repeat(Tensor) if tensors is None else iter(tensors)
        leaves = [next(found) if leaf is Tensor else leaf for leaf in self.leaves]
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

    def tensors_alone(*tensors: Tensor) -> list[Tensor]:
        nonlocal tree
        found, tree = tree_flatten(function(*tensors))
        leaves[:] = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in found]
        return [*_tensors_in(found), *reads.guarded]

    reads = _HostReads(numbers[1:], arguments, readable, changed)
    functions: dict[Any, Callable[..., Any]] = {}
    for function_to_host in TO_HOST:
        functions[function_to_host] = partial(reads.copy_to_host, function_to_host)
    for constructor in CONSTRUCTORS:
        functions[constructor] = partial(reads.construct, constructor)
    copies = ReplaceFunctions(functions)
    with pyro.validation_enabled(False), reads, copies:
        module = record_graph(tensors_alone, inputs)
    constants = _lift_constants(module)
    if any(constant.layout is not torch.strided for constant in constants):
        raise UncapturableError("it uses a sparse tensor")
    guards = _take_guards(module, constants, len(numbers), reads.guarded)
    device = inputs[0].device if inputs else torch.device("cpu")
    if device.type != "cpu":
        constants = _with_literals_on(device, module, constants)
    return Graph(module, constants, leaves, tree, reads.read, guards)


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
        self.read: set[int] = set()
        #: The values that it has read from arguments.
        self.guarded: list[Tensor] = []
        # By memory: the ids of the numbers and readable tensors that its content comes from, and ``ARGUMENTS`` if it
        # comes from these; None if it comes from others too.
        self._sources: dict[int, set[int] | None] = {}
        # Other tensors must not get the memory of these.
        self._known: list[Tensor] = []
        # After the latest draw.
        self._noise = TorchNoise.now()
        for tensor in readable:
            if _is_readable(tensor):
                self._note(tensor, {id(tensor)})
        for tensor in numbers:
            self._note(tensor, {id(tensor)})
        for tensor in arguments:
            self._note(tensor, {ARGUMENTS})
        for tensor in changed:
            self._note(tensor, None)

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
                indices += self._numbers(index)
            args = args[0], indices
        elif shape or torch.Tag.data_dependent_output in func.tags:
            with untraced():
                result = func(*args, **kwargs)
            traced = func(*args, **kwargs) if shape else (args, kwargs)
            self.reads((args, kwargs), SHAPE_READ if shape else VALUE_READ, traced)
            return result
        read = args[1:] if func in LIKE else args
        sources = set() if func is LITERAL else self._sources_of((read, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            sources = None
            self._check_noise()
        changed = _changed_by(func, args, kwargs)
        result = func(*args, **kwargs)
        if draws:
            self._noise = TorchNoise.now()
        for tensor in (*changed, *_tensors_in(result)):
            self._note(tensor, sources)
        return result

    def _check_noise(self) -> None:
        """Raise an error if the state of a generator is not that after the latest draw."""
        now = TorchNoise.now()
        if not all(map(torch.equal, (now.cpu, *now.cuda), (self._noise.cpu, *self._noise.cuda))):
            raise UncapturableError(SEEDED)

    def reads(self, tree: object, reason: str = VALUE_READ, values: object = None) -> None:
        """Note that the host reads tensors, or raise an error.

        :param values: what it reads of them; by default all.
        """
        sources = self._sources_of(tree)
        if sources is None:
            raise UncapturableError(reason)
        if ARGUMENTS in sources:
            tensors = _tensors_in(tree if values is None else values)
            if sum(tensor.nbytes for tensor in tensors) > MOST_GUARDED:
                raise UncapturableError(reason)
            # Copies, because the program may change them.
            self.guarded += map(torch.ops.aten.clone.default, tensors)
        self.read |= sources - {ARGUMENTS}

    def copy_to_host(
        self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Copy a tensor to the host, which no operation shows."""
        self.reads(tensor)
        with untraced():
            return function(tensor, *args, **kwargs)

    def construct(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of a list, whose tensors no operation shows."""
        self.reads([argument for argument in args if isinstance(argument, list | tuple)])
        return function(*args, **kwargs)

    def _numbers(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return an index, or the places of a mask, which have a shape of their own."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        self.reads(index, SHAPE_READ)
        with untraced():
            return index.nonzero().unbind(1)

    def _sources_of(self, tree: object) -> set[int] | None:
        """Return what the values of the tensors in a tree come from; None if they come from anything else too."""
        found: set[int] = set()
        for tensor in _tensors_in(tree):
            sources = self._sources.get(_memory(tensor))
            if sources is None:
                return None
            found |= sources
        return found

    def _note(self, tensor: Tensor, sources: set[int] | None) -> None:
        """Note what the value of a tensor comes from."""
        self._sources[_memory(tensor)] = sources
        if sources is not None:
            self._known.append(tensor)


class ChangedTensors(TorchDispatchMode):
    """Remember the values of tensors from before that operations change in the block."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        #: Each tensor before a change of it, with a copy.
        self.before: list[tuple[Tensor, Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations have changed, one for each change."""
        return [tensor for tensor, _ in self.before]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _changed_by(func, args, kwargs):
            if _memory(tensor) not in self._made:
                self.before.append((tensor.detach(), tensor.clone()))
        result = func(*args, **kwargs)
        # A view has the memory of an argument, and a tensor of Python numbers memory of its own.
        given = () if func is LITERAL else (args, kwargs)
        self._made |= {*map(_memory, _tensors_in(result))} - {*map(_memory, _tensors_in(given))}
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
def note_replaced_buffers() -> Iterator[Buffers]:
    """Find the buffers that modules replace in the block, which no operation shows."""
    found: Buffers = {}

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        holder = module._buffers
        key = id(holder), name
        before = found[key][1] if key in found else holder.get(name)
        found[key] = holder, before, buffer

    hook = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        hook.remove()


@torch.no_grad()
def put_buffers_back(buffers: Buffers, *, write: bool = False) -> None:
    """Put the buffers from before back; ``write`` copies the present values into them, which a graph can do."""
    for (_, name), (holder, before, now) in buffers.items():
        if not isinstance(before, Tensor) or before.is_meta:
            continue
        # A network that was called with the buffers of another has its own again.
        if now is not before and holder.get(name) is now:
            if write:
                before.copy_(holder[name])
            holder[name] = before


def _changed_by(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an operation changes; kernels of batch norm change statistics without saying so."""
    changed: list[object] = []
    if "batch_norm" in str(func) and "backward" not in str(func):
        changed += args[3:5]
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return _tensors_in(changed)


def _take_guards(
    module: GraphModule, constants: Sequence[Tensor], numbers: int, expected: Sequence[Tensor]
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
        raise UncapturableError(VALUE_READ)
    for node in guarded:
        module.graph.erase_node(node)
    module.recompile()
    (output,) = guards.graph.find_nodes(op="output")
    output.args = (output.args[0][-len(expected) :],)
    # Draws and changes of tensors are left to the graph of the loss.
    guards.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    inputs: list[Tensor | int] = []
    for number, node in enumerate(guards.graph.find_nodes(op="placeholder")):
        if node.users:
            argument = number - len(constants) - numbers
            inputs.append(constants[number] if argument < 0 else argument)
        else:
            guards.graph.erase_node(node)
    guards.recompile()
    values = [value.detach().clone() for value in expected]
    return Guards(guards, inputs, values)


def _lift_constants(module: GraphModule) -> list[Tensor]:
    """Turn the tensors in a graph into its first inputs, each once."""
    graph = module.graph
    first = next(iter(graph.nodes))
    lifted: dict[int, Node] = {}
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
    for name in (*module._parameters, *module._buffers):
        if "_constant" in name:
            delattr(module, name)
    return tensors


def _with_literals_on(
    device: torch.device, module: GraphModule, constants: list[Tensor]
) -> list[Tensor]:
    """Compute once what depends on literals in host memory alone, and put it on a device, so that no step copies it.

    :returns: the constants of the changed graph.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    places = graph.find_nodes(op="placeholder")[: len(constants)]
    # The tensors that are still inputs, and those that are known from literals alone.
    kept: dict[Node, Tensor] = {}
    known: dict[Node, Tensor] = {}
    for node, tensor in zip(places, constants, strict=True):
        if tensor.device.type == "cpu" and all(user.target is LITERAL_COPY for user in node.users):
            known[node] = tensor
        else:
            kept[node] = tensor
    for node in graph.nodes:
        inputs = node.all_input_nodes
        computes = node.op == "call_function" and bool(inputs) and _is_pure(node)
        if computes and known.keys() >= set(inputs):
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
    """Return whether a node only computes, and nothing writes into its result."""
    for one in (node, *node.users):
        schema = getattr(one.target, "_schema", None)
        if schema is None or schema.is_mutable:
            return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
