# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a captured graph depends on besides its inputs: the modules, their plain attributes, and where tensors are."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn

from pyro_radial._pyro.compat import stored_parameters
from pyro_radial.nn.bayesian_module import submodules

__all__ = ["Slot", "Structure", "slots_of", "unchanged"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# How far modules are looked for in functions that call functions.
DEPTH = 4

# Read by distributions when they compute, and so fixed in a graph.
SETTINGS = ("module_local_params", "radial_kl_directions", "radial_kl_seed")


class Slot(NamedTuple):
    """A place that holds a tensor: a dict and its key."""

    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        value: Tensor = self.holder[self.key]
        return value


def slots_of(*roots: Any) -> list[Slot]:
    """Where the modules, and those below them, keep their parameters and buffers, and Pyro's store its parameters.

    :param roots: modules, functions that use modules, and anything else, which is passed over.
    """
    holders = [holder for module in _modules(*roots) for holder in (module._parameters, module._buffers)]
    slots = [Slot(holder, key) for holder in holders for key, value in holder.items() if value is not None]
    stored = stored_parameters()
    # The skeleton of a network has its tensors on no device.
    return [slot for slot in (*slots, *(Slot(stored, name) for name in stored)) if not slot.tensor.is_meta]


class Structure:
    """A record of modules and other objects as they are, but for the values of their tensors.

    :param modules: modules, of which all below them count as well, and functions that use modules.
    :param objects: objects whose public attributes count, such as a loss.
    :param ignore: attributes of these objects that may change.
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
        """Whether everything is as it was."""
        # Plain loops: this is asked at every step.
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
def unchanged(*roots: Any, attributes: bool = True) -> Iterator[None]:
    """Run what changes buffers, plain attributes and the generators of random numbers, and put all of them back.

    :param roots: modules, functions that use modules, and anything else, which is passed over.
    :param bool attributes: whether the attributes are put back too, which a first run may have set up.
    """
    modules = _modules(*roots)
    buffers = [(slot, slot.tensor, slot.tensor.detach().clone()) for m in modules for slot in _buffers(m)]
    plain = [(vars(m), {k: v for k, v in vars(m).items() if _is_plain(v)}) for m in modules if attributes]
    devices = {slot.tensor.device for slot in slots_of(*roots) if slot.tensor.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            for slot, tensor, value in buffers:
                with torch.no_grad():
                    tensor.copy_(value)
                slot.holder[slot.key] = tensor
            for now, before in plain:
                now.update(before)


def _buffers(module: nn.Module) -> list[Slot]:
    found = [Slot(module._buffers, key) for key, value in module._buffers.items() if value is not None]
    return [slot for slot in found if not slot.tensor.is_meta]


def _modules(*roots: Any) -> list[nn.Module]:
    """The modules among these, below them, and in the closures and globals of those that are functions."""
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
