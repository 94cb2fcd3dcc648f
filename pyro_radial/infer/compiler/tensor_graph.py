# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Record a function of tensors as a graph, and find the tensors that it changes."""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from pyro_radial._pyro.compat import (
    ReplaceFunctions,
    capturing,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial._pyro.types import Args, Kwargs
from pyro_radial.infer.compiler.state import MOST_BYTES, IdentityMap, Refused, metadata_of

# Functions that copy values to the host, besides operations, which have tags. Legacy constructors, such as
# torch.FloatTensor([number]), call __float__.
TO_HOST = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__repr__,
)
# Functions that read the tensors in a list, as in torch.tensor([number, 1.0]).
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
# The largest value in bytes that Python may read from the arguments; it becomes a guard.
MOST_GUARDED = 64
# The types of arguments of operations that a graph can hold, besides tensors.
ARGUMENT_TYPES = (*fx.node.base_types, type(None), torch.layout)
# Stands for all arguments, in the set of sources that a value is computed from.
ARGUMENTS = torch.empty(0)
LITERAL = torch.ops.aten.lift_fresh.default
LITERAL_COPY = torch.ops.aten.lift_fresh_copy.default
TO_DTYPE = torch.ops.aten._to_copy.default
# Operations on integers with results of twice as many digits.
PRODUCTS = {
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.pow.Scalar,
    torch.ops.aten.pow.Tensor_Scalar,
    torch.ops.aten.pow.Tensor_Tensor,
    torch.ops.aten.bitwise_left_shift.Tensor_Scalar,
    torch.ops.aten.__lshift__.Scalar,
}
# Operations that use shape, dtype and device of their first argument, but not its values.
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

# For each dict of buffers, by its number, and name that were assigned to: the dict, the previous buffer, and the latest
# one.
Buffers = dict[tuple[int, str], tuple[dict[str, Any], Tensor | None, Tensor | None]]


class Guards(NamedTuple):
    """The values that Python read from the arguments while a program was recorded, and a graph that computes them.

    ``module`` takes ``inputs``, which are constants, or arguments by their positions, and returns the values.
    """

    module: GraphModule
    inputs: list[Tensor | int]
    expected: list[Tensor]

    def match(self, arguments: Sequence[Tensor]) -> bool:
        """Return whether these arguments give the values of the recorded run."""
        inputs = [arguments[entry] if isinstance(entry, int) else entry for entry in self.inputs]
        return all(map(torch.equal, self.module(*inputs), self.expected))


class Graph(NamedTuple):
    """A recorded function: ``module`` takes ``[*constants, *inputs]`` and returns the tensors of the result.

    The constants are the tensors that the function read besides its inputs. ``leaves`` and ``tree`` are the leaves and
    the structure of the result, with ``Tensor`` in place of each tensor. ``host_reads`` has the constants and numbers
    that Python read.
    """

    module: GraphModule
    constants: list[Tensor]
    leaves: list[object]
    tree: Any
    host_reads: set[Tensor]
    guards: Guards | None

    def result(self, tensors: Sequence[Tensor] | None = None) -> Any:
        """Return the result with these tensors; without tensors, with the class ``Tensor`` in place of each."""
        remaining_tensors = repeat(Tensor) if tensors is None else iter(tensors)
        leaves = [next(remaining_tensors) if leaf is Tensor else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.tree)


def record(
    function: Callable[..., Any],
    numbers: Sequence[Tensor],
    arguments: Sequence[Tensor],
    readable: Iterable[Tensor] = (),
    changed: Iterable[Tensor] = (),
    dtype: torch.dtype = torch.float32,
) -> Graph:
    """Record the operations of a function that takes ``[*numbers, *arguments]`` and returns a tree with tensors.

    Python may read the tensors below; reading any other value, such as a draw, raises an error.

    :param numbers: 0-d tensors instead of Python numbers; all but the first may be read.
    :param arguments: small values that are computed from them may be read; see :class:`Guards`.
    :param readable: other tensors that may be read if they are small.
    :param changed: tensors that the function changes, and that may not be read.
    :param dtype: the dtype that numbers get where they meet no tensor of numbers with a fraction.
    :raises Refused: if the function does something that a graph cannot do.
    """
    recorder = _Recorder(numbers, arguments, readable, changed, dtype)
    replacements: dict[Any, Callable[..., Any]] = {
        reader: partial(recorder.copy_to_host, reader) for reader in TO_HOST
    }
    replacements |= {
        constructor: partial(recorder.construct, constructor) for constructor in CONSTRUCTORS
    }
    with (
        pyro.validation_enabled(False),
        capturing(),
        recorder,
        ReplaceFunctions(replacements),
    ):
        leaves, tree = tree_flatten(function(*numbers, *arguments))
    module = recorder.finish(_tensors_in(leaves))
    constants = recorder.constants
    if any(constant.layout is not torch.strided for constant in constants):
        raise Refused("it uses a sparse tensor")
    guards = _split_off_guards(module, constants, len(numbers), recorder.guarded)
    device = numbers[0].device if numbers else torch.device("cpu")
    if device.type != "cpu":
        constants = _fold_literals(device, module, constants)
    leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Graph(module, constants, leaves, tree, recorder.host_reads, guards)


class _Recorder(TorchDispatchMode):
    """Record the operations in the block as nodes of a graph, and note the values that Python reads.

    ``torch.fx.experimental.proxy_tensor.make_fx`` does the first too. It takes longer, since it also runs each
    operation on fake tensors.

    Python may read values that are computed only from numbers, readable tensors and arguments; it follows which inputs
    each value is computed from.
    """

    def __init__(
        self,
        numbers: Sequence[Tensor],
        arguments: Sequence[Tensor],
        readable: Iterable[Tensor],
        changed: Iterable[Tensor],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.host_reads: set[Tensor] = set()
        #: The values that Python has read from arguments.
        self.guarded: list[Tensor] = []
        #: The tensors that are read and neither inputs nor results of operations.
        self.constants: list[Tensor] = []
        self._graph = fx.Graph()
        self._nodes: Any = WeakTensorKeyDictionary()
        for position, tensor in enumerate((*numbers, *arguments)):
            self._set_node(tensor, self._graph.placeholder(f"input_{position}"))
        # The node of the latest constant; constants come before the inputs, which operations follow.
        self._latest_constant: Node | None = None
        self._is_paused = False
        # For each memory: the numbers and readable tensors that its values are computed from, and ``ARGUMENTS``
        # for arguments; None if Python may not read them.
        self._sources: dict[int, set[Tensor] | None] = {}
        # Keep tensors alive so that their memory is not used again.
        self._tensors_kept_alive: list[Tensor] = []
        # The memory of numbers, and of what is computed from numbers alone.
        self._numbers: set[int] = set(map(_memory, numbers[1:]))
        self._dtype = dtype
        # The state of torch's generators after the latest draw.
        self._noise = TorchNoise.current()
        for tensor in readable:
            if _is_readable(tensor):
                self._set_sources(tensor, {tensor})
        for tensor in numbers[1:]:
            self._set_sources(tensor, {tensor})
        for tensor in arguments:
            self._set_sources(tensor, {ARGUMENTS})
        for tensor in changed:
            self._set_sources(tensor, None)

    def finish(self, results: Sequence[Tensor]) -> GraphModule:
        """Return a module that computes the results, and then the values that Python has read from arguments."""
        self._graph.output([self._node_of(tensor) for tensor in (*results, *self.guarded)])
        self._graph.eliminate_dead_code(_has_effect)
        return GraphModule(nn.Module(), self._graph)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run an operation, record it, and note the sources of its results, and the values that Python reads by it."""
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        args, kwargs = self._as_python_would(func, args, kwargs)
        shape = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            indices: list[Tensor | None] = []
            for index in args[1]:
                indices += self._index_tensors(index)
            args = args[0], indices
        elif shape or torch.Tag.data_dependent_output in func.tags:
            result = func(*args, **kwargs)
            read = self._run(func, args, kwargs) if shape else (args, kwargs)
            self.note_read((args, kwargs), SHAPE_READ if shape else VALUE_READ, read)
            return result
        read = args[1:] if func in LIKE else args
        sources = set() if func is LITERAL else self._find_sources((read, kwargs))
        inputs = _tensors_in((args, kwargs)) if self._numbers else []
        is_number = bool(inputs) and all(map(self._is_number, inputs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            sources = None
            self._check_noise()
        changed = _changed_by(func, args, kwargs)
        result = self._run(LITERAL_COPY if func is LITERAL else func, args, kwargs)
        if draws:
            self._noise = TorchNoise.current()
        for tensor in (*changed, *_tensors_in(result)):
            self._set_sources(tensor, sources)
            if is_number:
                self._numbers.add(_memory(tensor))
        return result

    def _run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operation, and add it to the graph."""
        # The nodes of the arguments from before the operation changes them.
        node_args, node_kwargs = tree_map(self._as_argument, (args, kwargs))
        result = func(*args, **kwargs)
        node = self._graph.call_function(func, node_args, node_kwargs)
        if isinstance(result, Tensor):
            self._set_node(result, node)
        elif isinstance(result, tuple | list):
            for position, tensor in enumerate(result):
                if isinstance(tensor, Tensor):
                    item = self._graph.call_function(operator.getitem, (node, position))
                    self._set_node(tensor, item)
        return result

    def _as_python_would(self, func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments of an operation, with numbers in the dtype in which Python's own would take part.

        Among themselves numbers are float64 or integers. Where they meet tensors, they do not change the dtype of the
        result. A product of integers may be too large for 64 bits, so it counts as read by Python.
        """
        tensors = _tensors_in((args, kwargs)) if self._numbers else []
        numbers = list(filter(self._is_number, tensors))
        if not numbers:
            return args, kwargs
        if len(numbers) < len(tensors):
            floats = list(filter(torch.is_floating_point, tensors))
            dtypes = [tensor.dtype for tensor in floats if not self._is_number(tensor)]
            dtype = dtypes[0] if dtypes else self._dtype
            numbers = [number for number in numbers if number.is_floating_point()]
        elif func._schema.is_mutable:
            return args, kwargs
        else:
            results = _tensors_in(func(*args, **kwargs))
            if not any(map(torch.is_floating_point, results)):
                if func in PRODUCTS:
                    self.note_read(numbers)
                return args, kwargs
            dtype = self._dtype if any(result.dim() for result in results) else torch.float64
        converted: dict[Tensor, Tensor] = {}
        for number in numbers:
            if number.dtype != dtype:
                converted[number] = self._run(TO_DTYPE, (number,), {"dtype": dtype})
                self._set_sources(converted[number], self._find_sources(number))
        return tree_map_only(Tensor, lambda tensor: converted.get(tensor, tensor), (args, kwargs))

    def _is_number(self, tensor: Tensor) -> bool:
        """Return whether a tensor stands for a Python number."""
        return tensor.dim() == 0 and _memory(tensor) in self._numbers

    def _as_argument(self, value: object) -> Any:
        """Return an argument of an operation as a node has it."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if not isinstance(value, ARGUMENT_TYPES):
            raise Refused(f"an operation takes a {type(value).__name__}")
        return value

    def _node_of(self, tensor: Tensor) -> Node:
        """Return the node that computes a tensor; a tensor from elsewhere becomes a constant."""
        node = self._nodes.get(tensor)
        if node is None:
            first_node = next(iter(self._graph.nodes), None)
            with (
                self._graph.inserting_after(self._latest_constant)
                if self._latest_constant is not None
                else self._graph.inserting_before(first_node)
            ):
                node = self._graph.placeholder(f"constant_{len(self.constants)}")
            self._latest_constant = node
            self.constants.append(tensor)
            self._set_node(tensor, node)
        return node

    def _set_node(self, tensor: Tensor, node: Node) -> None:
        """Note the node that computes a tensor."""
        if tensor.layout is torch.strided:
            node.meta["metadata"] = metadata_of(tensor)
        self._nodes[tensor] = node

    def _check_noise(self) -> None:
        """Raise an error if the program has set a generator's state since the latest draw."""
        noise = TorchNoise.current()
        if not all(
            map(torch.equal, (noise.cpu, *noise.cuda), (self._noise.cpu, *self._noise.cuda))
        ):
            raise Refused(SEEDED)

    def note_read(self, tree: object, reason: str = VALUE_READ, values: object = None) -> None:
        """Note that Python reads the tensors in a tree, or raise an error if it may not.

        :param reason: the text of the error.
        :param values: the values that it reads, if they are fewer than those of the tensors.
        """
        sources = self._find_sources(tree)
        if sources is None:
            raise Refused(reason)
        if ARGUMENTS in sources:
            tensors = _tensors_in(tree if values is None else values)
            if sum(tensor.nbytes for tensor in tensors) > MOST_GUARDED:
                raise Refused(reason)
            # Copies, because the program may change them.
            for tensor in tensors:
                self.guarded.append(self._run(torch.ops.aten.clone.default, (tensor,), {}))
        self.host_reads |= sources - {ARGUMENTS}

    def copy_to_host(
        self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function that copies a tensor to the host, such as ``Tensor.tolist``, and note that it reads it."""
        self.note_read(tensor)
        self._is_paused = True
        try:
            return function(tensor, *args, **kwargs)
        finally:
            self._is_paused = False

    def construct(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a constructor, such as ``torch.tensor``, and note that it reads the tensors in a list."""
        self.note_read([argument for argument in args if isinstance(argument, list | tuple)])
        return function(*args, **kwargs)

    def _index_tensors(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return an index as it is, or for a mask the positions of its true entries, which Python reads."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        self.note_read(index, SHAPE_READ)
        return index.nonzero().unbind(1)

    def _find_sources(self, tree: object) -> set[Tensor] | None:
        """Return the sources that the tensors in a tree are computed from; None if Python may not read one of them."""
        sources_of_all: set[Tensor] = set()
        for tensor in _tensors_in(tree):
            sources = self._sources.get(_memory(tensor))
            if sources is None:
                return None
            sources_of_all |= sources
        return sources_of_all

    def _set_sources(self, tensor: Tensor, sources: set[Tensor] | None) -> None:
        """Note the sources that a tensor's values are computed from."""
        self._sources[_memory(tensor)] = sources
        if sources is not None:
            self._tensors_kept_alive.append(tensor)


class ChangedTensors(TorchDispatchMode):
    """Keep a copy of each tensor that operations in the block change in place, from before the change.

    Tensors that were created in the block are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._new_memory: set[int] = set()
        #: For each change: the tensor, and a copy from before the change.
        self.originals: list[tuple[Tensor, Tensor]] = []

    def tensors(self) -> list[Tensor]:
        """Return the tensors that operations have changed; one comes once for each change."""
        return [tensor for tensor, _ in self.originals]

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Copy the tensors that an operation is going to change, and run it."""
        kwargs = kwargs or {}
        for tensor in _changed_by(func, args, kwargs):
            if _memory(tensor) not in self._new_memory:
                self.originals.append((tensor.detach(), tensor.clone()))
        result = func(*args, **kwargs)
        # A view shares the memory of an argument. A literal, a tensor of Python numbers, has new memory.
        inputs = () if func is LITERAL else (args, kwargs)
        self._new_memory |= {*map(_memory, _tensors_in(result))} - {
            *map(_memory, _tensors_in(inputs))
        }
        return result


def _tensors_in(tree: object) -> list[Tensor]:
    """Return the tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_readable(tensor: Tensor) -> bool:
    """Return whether Python may read a tensor: a small one in host memory that requires no gradient."""
    # Subclasses of Tensor may raise an error when their attributes are read.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    in_host_memory = tensor.device.type == "cpu" and tensor.nbytes <= MOST_BYTES
    return in_host_memory and not tensor.requires_grad


def _memory(tensor: Tensor) -> int:
    """Return a key of a tensor's memory, which it shares with its views."""
    # Sparse tensors have several memories.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else tensor._cdata


@contextmanager
def restore_after(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors at the end of the block."""
    originals = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        restore_tensors(originals)


@torch.no_grad()
def restore_tensors(originals: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy values back into tensors, given pairs of a tensor and its value; later pairs are undone first."""
    for tensor, original in reversed(originals):
        tensor.copy_(original)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Undo at the end of the block what it changes: tensors, replaced buffers, and the state of torch's generators."""
    noise = TorchNoise.current()
    changed = ChangedTensors()
    with note_replaced_buffers() as buffers:
        try:
            with changed:
                yield
        finally:
            restore_buffers(buffers)
            restore_tensors(changed.originals)
            noise.restore()


@contextmanager
def note_replaced_buffers() -> Iterator[Buffers]:
    """Collect the buffers that modules replace by assignment in the block, which tensor operations do not show."""
    replaced_buffers: Buffers = {}
    numbers = IdentityMap()

    def note(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        holder = module._buffers
        key = numbers.setdefault(holder, len(replaced_buffers)), name
        previous = replaced_buffers[key][1] if key in replaced_buffers else holder.get(name)
        replaced_buffers[key] = holder, previous, buffer

    hook = nn.modules.module.register_module_buffer_registration_hook(note)
    try:
        yield replaced_buffers
    finally:
        hook.remove()


@torch.no_grad()
def restore_buffers(buffers: Buffers, *, write: bool = False) -> None:
    """Assign the previous buffers to their modules.

    :param write: whether to copy the latest values into the previous buffers, so that a graph changes these in place.
    """
    for (_, name), (holder, previous, latest) in buffers.items():
        if not isinstance(previous, Tensor) or previous.is_meta:
            continue
        # A module without the latest buffer, such as after functional_call, has its previous one already.
        if latest is not previous and holder.get(name) is latest:
            if write:
                previous.copy_(holder[name])
            holder[name] = previous


def _changed_by(func: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    changed: list[object] = []
    # The schema of batch norm does not say that it changes the running statistics.
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
    """Move the guarded values, the last results of a graph, into a separate graph that computes only them.

    :param module: takes constants, numbers and arguments.
    :param expected: the guarded values.
    """
    if not expected:
        return None
    guards = copy.deepcopy(module)
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    output.args = (results[: -len(expected)],)
    guarded = results[-len(expected) :]
    # A constructor such as torch.FloatTensor([number]) reads an input without an operation that could be a guard.
    if any(node.op == "placeholder" for node in guarded):
        raise Refused(VALUE_READ)
    for node in guarded:
        module.graph.erase_node(node)
    module.recompile()
    (output,) = guards.graph.find_nodes(op="output")
    output.args = (output.args[0][-len(expected) :],)
    # Draws and changes of tensors stay in the graph of the loss only.
    guards.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    inputs: list[Tensor | int] = []
    for position, node in enumerate(guards.graph.find_nodes(op="placeholder")):
        if node.users:
            argument = position - len(constants) - num_numbers
            inputs.append(constants[position] if argument < 0 else argument)
        else:
            guards.graph.erase_node(node)
    guards.recompile()
    return Guards(guards, inputs, [value.detach().clone() for value in expected])


def _fold_literals(
    device: torch.device, module: GraphModule, constants: list[Tensor]
) -> list[Tensor]:
    """Evaluate operations on literals, tensors of Python numbers in host memory, and make the results constants.

    Scalars among them go to the device, so that no step copies them there.

    :returns: the constants of the changed graph.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    inputs_of_constants = graph.find_nodes(op="placeholder")[: len(constants)]
    # The inputs that stay, with their tensors, and the nodes whose tensors depend only on literals.
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
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), folded.__getitem__)
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


def _has_effect(node: Node) -> bool:
    """Return whether a graph needs a node without its result: it changes tensors, or draws noise."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    # The schema of batch norm does not say that it changes the running statistics.
    return node.is_impure() or is_random or "batch_norm" in str(node.target)


def _is_pure(node: Node) -> bool:
    """Return whether an operation draws no noise and changes nothing, and no user of its result writes into it."""
    for operation in (node, *node.users):
        schema = getattr(operation.target, "_schema", None)
        if schema is None or schema.is_mutable:
            return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
