# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A function of tensors recorded as a graph, and the modules and tensors that it depends on besides its inputs."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_radial._pyro.compat import capturing, record_graph, stored_parameters
from pyro_radial.nn.bayesian_module import submodules

__all__ = [
    "PLAIN",
    "Graph",
    "Slot",
    "Structure",
    "UncapturableError",
    "described",
    "record",
    "slots_of",
    "unchanged",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# How deep to look for modules in functions that call functions.
DEPTH = 4

# Settings that a graph fixes.
SETTINGS = ("module_local_params", "radial_kl_directions", "radial_kl_seed")


class Slot(NamedTuple):
    """A dict and a key that hold a tensor."""

    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """The current tensor."""
        value: Tensor = self.holder[self.key]
        return value


def slots_of(*roots: Any) -> list[Slot]:
    """All places of parameters and buffers in modules, in modules that functions use, and in Pyro's store."""
    holders = [holder for module in _modules(*roots) for holder in (module._parameters, module._buffers)]
    return _slots(*holders, stored_parameters())


def _slots(*holders: dict[str, Any]) -> list[Slot]:
    """The places of the tensors in these dicts; those of a network's skeleton are on the meta device and left out."""
    found = [Slot(holder, key) for holder in holders for key, value in holder.items() if value is not None]
    return [slot for slot in found if not slot.tensor.is_meta]


class Structure:
    """The submodules and plain attributes at one time of modules, in functions too, and of objects such as a loss.

    Private attributes of the objects, and those to ``ignore``, may change.
    """

    def __init__(self, modules: tuple[Any, ...], objects: tuple[Any, ...] = (), ignore: tuple[str, ...] = ()) -> None:
        roots = (*modules, *(value for thing in objects for value in vars(thing).values()))
        self._trees = [(module._modules, dict(module._modules)) for module in _modules(*roots)]
        self._tensors = [
            (holder, frozenset(holder))
            for module in _modules(*roots)
            for holder in (module._parameters, module._buffers)
        ]
        self._plain = [
            (vars(thing), key, value)
            for thing in (*_modules(*roots), *objects)
            for key, value in vars(thing).items()
            if _is_plain(value) and not (thing in objects and (key in ignore or key.startswith("_")))
        ]
        self._settings = _settings()

    def holds(self) -> bool:
        """Whether nothing has changed."""
        # Plain loops: this runs at every step.
        for attributes, key, value in self._plain:
            now = attributes.get(key, self)
            if now is not value and now != value:
                return False
        for modules, before in self._trees:
            if modules.keys() != before.keys():
                return False
            for name, module in modules.items():
                if module is not before[name]:
                    return False
        return all(holder.keys() == keys for holder, keys in self._tensors) and _settings() == self._settings


@contextmanager
def unchanged(*roots: Any, attributes: bool = True, tensors: Sequence[Tensor] = ()) -> Iterator[None]:
    """Restore buffers, random numbers, these tensors and, if asked, plain attributes of modules after the block."""
    modules = _modules(*roots)
    buffers = [(slot, slot.tensor, slot.tensor.detach().clone()) for m in modules for slot in _slots(m._buffers)]
    plain = [(vars(m), {k: v for k, v in vars(m).items() if _is_plain(v)}) for m in modules if attributes]
    devices = {slot.tensor.device for slot in slots_of(*roots) if slot.tensor.device.type == "cuda"}
    values = [tensor.detach().clone() for tensor in tensors]
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
                for slot, tensor, value in buffers:
                    tensor.copy_(value)
                    slot.holder[slot.key] = tensor
            for now, before in plain:
                now.update(before)


def _modules(*roots: Any) -> list[nn.Module]:
    """All modules in these roots, below them, and in the closures and globals of functions."""
    found = {id(module): module for root in roots for module in submodules(*_modules_in(root, DEPTH))}
    return list(found.values())


def _modules_in(thing: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(thing, nn.Module):
        yield thing
    elif depth and isinstance(thing, partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _modules_in(part, depth - 1)
    elif depth and inspect.ismethod(thing):
        yield from _modules_in(thing.__self__, depth - 1)
    elif depth and inspect.isfunction(thing):
        variables = inspect.getclosurevars(thing)
        for part in (*variables.nonlocals.values(), *variables.globals.values()):
            yield from _modules_in(part, depth - 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(_is_plain(part) for part in value)
    return isinstance(value, PLAIN)


def _settings() -> list[Any]:
    return [pyro.settings.get(name) for name in SETTINGS]


class UncapturableError(Exception):
    """The reason why a program is not one graph."""


@dataclass
class Graph:
    """A recorded function: operations on ``[*constants, *inputs]``, and what it returned besides tensors.

    The constants are the tensors that the function read besides its inputs, by slot if they have one.
    """

    module: GraphModule
    constants: list[Slot | Tensor]
    static: Any
    seen: list[Tensor] = field(default_factory=list)

    def constant_tensors(self) -> list[Tensor]:
        """The current constants."""
        return [constant.tensor if isinstance(constant, Slot) else constant for constant in self.constants]

    def fits(self) -> bool:
        """Whether the constants have kept their shapes, strides, dtypes and devices."""
        for place, (constant, seen) in enumerate(zip(self.constants, self.seen, strict=True)):
            if isinstance(constant, Slot):
                tensor = constant.holder.get(constant.key)
                if tensor is seen:
                    continue
                if tensor is None or described(tensor) != described(seen):
                    return False
                self.seen[place] = tensor
        return True


def described(tensor: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that compiled code depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def record(
    function: Callable[..., tuple[list[Tensor], Any]], inputs: Sequence[Tensor], slots: Sequence[Slot], live: set[int]
) -> Graph:
    """Record the tensor operations of a function, which must return equal values besides tensors in each run.

    ``slots`` are the places of tensors that may be replaced, ``live`` the ids of tensors with values that may change.
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
    """Raise an error if the host reads an input; recording itself notices reads of computed tensors."""

    def __init__(self, live: set[int]) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and id(args[0]) in self.live:
            raise RuntimeError("data-dependent: a value of a tensor is read")
        return func(*args, **(kwargs or {}))


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
