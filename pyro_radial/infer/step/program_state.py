# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The Python state that a program reads: found while it runs, and compared before a graph of it is replayed."""

import dis
import inspect
import io
import logging
import operator
import random
import re
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import (
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from pyro.optim import PyroOptim
from pyro.poutine import Trace
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.optim import Optimizer

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    np.generic,
)
CONTENTS = (set, bytearray, array, np.ndarray)
# The generators of whole modules are seeded for each recording.
SEEDED = (random.random.__self__, np.random.random.__self__)  # type: ignore[attr-defined]
# What these give next cannot be seen before it is taken.
ONCE = (Iterator, random.Random, np.random.Generator, np.random.RandomState)

# Objects of training, a guide's memory of a model, files and logs, which no program reads.
OPAQUE = (Trace, PyroOptim, Optimizer, io.IOBase, logging.Logger)
# Packages that keep no state for a program in globals and classes.
FRAMEWORKS = frozenset({"torch", "pyro", "pyro_radial", "numpy", "opt_einsum", "sympy", "mpmath"})
# The machinery of imports and of type hints runs whenever something is imported for the first time.
MACHINERY = {"_distutils_hack", "setuptools", "typing_extensions"}
LIBRARIES = FRAMEWORKS | MACHINERY | sys.stdlib_module_names
# With more, comparing takes longer than a step.
MOST_PLACES, MOST_BYTES = 20_000, 4096
MISSING = object()
ABSENT = (KeyError, IndexError, AttributeError, ValueError, LookupError)
FLAGS = operator.attrgetter("requires_grad", "_backward_hooks")
# Objects that hold functions, and the attributes with these.
WRAPPERS = (partial, property, classmethod, staticmethod, cached_property, type(lru_cache(print)))
WRAPPED = ("func", "args", "keywords", "fget", "__func__", "__wrapped__")
# Attributes of torch and Pyro that all modules or distributions have. ``training`` and the dicts below count though.
INTERNAL = frozenset(vars(PyroModule())) - {"training"} | {
    "_batch_shape",
    "_event_shape",
    "_validate_args",
}
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MODULE_DICTS = ("_parameters", "_buffers", "_modules", "_pyro_samples", *MODULE_HOOKS)


class UncapturableError(Exception):
    """The reason why a program is not one graph."""


def metadata_of(tensor: Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor that compiled code depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Code:
    """The code that ran in a :meth:`watch` block, and the names in it; names of the user's code apart."""

    def __init__(self) -> None:
        self.ran: dict[CodeType, bool] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what runs."""

        def note(frame: FrameType, event: str, _: object) -> None:
            # Without the bodies of modules and classes, which run when a library imports something for the first time.
            if (
                event == "call"
                and frame.f_code.co_flags & inspect.CO_OPTIMIZED
                and frame.f_code not in self.ran
            ):
                self.ran[frame.f_code] = not is_library(frame.f_globals.get("__name__"))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)
        self.users = [code for code, users in self.ran.items() if users]
        self.names = _names_in(self.ran)
        self.users_names = _names_in(self.users)

    def line_of(self, path: str) -> str:
        """Return the user's line that stores the last name in a path, else the first line with it, in parentheses."""
        names = re.findall(r"\w+", path)[::-1]
        found: list[tuple[Any, ...]] = []
        for number, code in enumerate(self.users):
            for step in dis.get_instructions(code):
                if step.argval in names:
                    stores = step.opname.startswith("STORE")
                    order = names.index(step.argval), not stores, number
                    found.append((*order, code.co_filename, step.positions))
        if not found:
            return ""
        *_, file, place = min(found)
        return f" ({line(file, place.lineno)})" if place else ""


def line(file: str, number: int | None) -> str:
    """Return a line of a file, in words."""
    return f"{Path(file).name}, line {number}"


def is_library(module: object) -> bool:
    """Return whether a module of this name is not the user's."""
    # Named tuples are made in modules of their own.
    return isinstance(module, str) and (
        module.partition(".")[0] in LIBRARIES or module.startswith("namedtuple_")
    )


def _names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return all names and short strings in code, also in that of functions inside."""
    found: set[str] = set()
    waiting: list[object] = list(codes)
    for thing in waiting:
        if isinstance(thing, CodeType):
            found.update(thing.co_names, thing.co_freevars)
            waiting.extend(thing.co_consts)
        elif isinstance(thing, tuple):
            waiting.extend(thing)
        elif isinstance(thing, str) and len(thing) < 100:
            found.update(thing.split("."))
    return frozenset(found)


#: A function of a holder and a key that returns the value there.
Read = Callable[[Any, Any], Any]


class Place(NamedTuple):
    """Where a value is read, in words too, and whether the user's code names it."""

    read: Read
    holder: Any
    key: Any
    path: str
    users: bool

    def now(self) -> Any:
        """Return the present value."""
        try:
            return self.read(self.holder, self.key)
        except ABSENT:
            return MISSING

    def put(self, value: object) -> None:
        """Put a value there."""
        WRITES.get(self.read, setattr)(self.holder, self.key, value)


def _read_class(holder: type, key: str) -> Any:
    return vars(holder)[key]


class State:
    """The values that a program can read, starting from some roots.

    Attributes count if code that ran names them, closures and globals if their functions ran, and containers with all
    items. For a tensor, shape, dtype, ``requires_grad`` and hooks count; a graph reads its values, unless the host has
    read them too, and its id is in ``read``.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        code: Code,
        also: Iterable[tuple[Mapping[str, Any], str]] = (),
        ignored: Collection[str] = (),
        read: Collection[int] = (),
    ) -> None:
        self.code = code
        self.ignored = ignored
        self.read = read
        #: Why there can be no graph; None if nothing speaks against it.
        self.refusal: str | None = None
        self.places: list[Place] = []
        self.values: list[object] = []
        #: Each tensor once, in the order in which it was found.
        self.tensors: list[Tensor] = []
        self._known: set[tuple[int, object]] = set()
        self._seen: dict[int, object] = {}
        # Containers and the variables of objects with copies, and which new attributes of an object count.
        self._sized: list[tuple[Place, Any, Collection[str] | None]] = []
        self._waiting: list[tuple[object, str, bool]] = []
        for name, root in roots.items():
            self._waiting.append((root, name, False))
        for holder, name in also:
            self._add(Place(operator.getitem, holder, name, f"parameter {name}", False))
        # Tensors of a class of their own may refuse that their attributes are read.
        with DisableTorchFunctionSubclass():
            while self._waiting:
                self._visit(*self._waiting.pop())
        self._flatten()

    def holds(self) -> bool:
        """Return whether all is as it was, apart from tensors that were replaced by their like."""
        with DisableTorchFunctionSubclass():
            return self._is_as_it_was() or self._is_alike()

    def _is_as_it_was(self) -> bool:
        """Return whether no value, size or tensor is another one."""
        with suppress(*ABSENT):
            for read, same, values, holders, keys in self._reads:
                if not all(map(same, map(read, holders, keys), values)):
                    return False
            if list(map(len, self._holders)) != self._sizes:
                return False
            return list(map(FLAGS, self.tensors)) == self._flags
        return False

    def _is_alike(self) -> bool:
        """Return whether only tensors were replaced by their like, and take these over."""
        if self.changes():
            return False
        new: dict[int, Any] = {}
        for place, value in zip(self.places, self.values, strict=True):
            new[id(value)] = place.now()
        self.values = [new[id(value)] for value in self.values]
        self.tensors = [new.get(id(tensor), tensor) for tensor in self.tensors]
        self._flatten()
        return True

    def changes(self, *, replaced: bool = False) -> list[tuple[str, bool]]:
        """Return what has changed, and whether the user's code names it; ``replaced`` counts all replaced tensors."""
        found: list[tuple[str, bool]] = []
        now_at: dict[int, object] = {}
        with DisableTorchFunctionSubclass():
            flags = dict(zip(map(id, self.tensors), self._flags, strict=True))
            for place, value in zip(self.places, self.values, strict=True):
                now = place.now()
                same = _equal(value, now)
                if isinstance(value, Tensor) and isinstance(now, Tensor):
                    other = (
                        replaced or id(value) in self.read or metadata_of(now) != metadata_of(value)
                    )
                    # Two places of one tensor must stay places of one tensor.
                    one = now_at.setdefault(id(value), now) is now
                    same = (same or not other) and one and FLAGS(now) == flags[id(value)]
                if not same:
                    found.append((place.path, place.users))
        for place, before, counted in self._sized:
            if len(place.holder) != len(before) and counted is None:
                found.append((place.path, place.users))
            elif len(place.holder) != len(before):
                for key in sorted(counted & (place.holder.keys() - before)):
                    found.append((f"{place.path}.{key}", key in self.code.users_names))
        return found

    def changed_numbers(self) -> list[str]:
        """Return the paths of Python numbers that have changed."""
        paths: list[str] = []
        for place, value in zip(self.places, self.values, strict=True):
            now = place.now()
            if type(value) in (int, float) and type(now) is type(value) and now != value:
                paths.append(place.path)
        return paths

    def restore(self) -> None:
        """Put all values back."""
        for place, before, counted in self._sized:
            if len(place.holder) != len(before) and counted is None:
                _refill(place.holder, None, before)
            elif len(place.holder) != len(before):
                for key in place.holder.keys() - before:
                    delattr(place.key, key)
        for place, value in zip(self.places, self.values, strict=True):
            if not _equal(value, place.now()):
                place.put(value)

    def _flatten(self) -> None:
        """Arrange what is compared, for speed: all values that are read alike in three lists."""
        by_read: dict[Read, tuple[list[object], list[object], list[object]]] = {}
        for place, value in zip(self.places, self.values, strict=True):
            values, holders, keys = by_read.setdefault(place.read, ([], [], []))
            values.append(value)
            holders.append(place.holder)
            keys.append(place.key)
        self._reads: list[tuple[Any, ...]] = []
        for read, lists in by_read.items():
            same = operator.eq if read is _content else operator.is_
            self._reads.append((read, same, *lists))
        self._holders = [place.holder for place, _, _ in self._sized]
        self._sizes = list(map(len, self._holders))
        with DisableTorchFunctionSubclass():
            self._flags = list(map(FLAGS, self.tensors))

    def _visit(self, thing: object, path: str, users: bool) -> None:
        """Note the places in a thing."""
        if id(thing) in self._seen or isinstance(thing, (*PLAIN, *OPAQUE)):
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            self.tensors.append(thing)
            self._waiting.append((thing._backward_hooks, f"hooks of {path}", True))
            if id(thing) in self.read:
                self._add(Place(_content, thing, None, path, users))
        elif isinstance(thing, ONCE) and users and not any(thing is seeded for seeded in SEEDED):
            self.refusal = (
                f"it takes values from {path}{self.code.line_of(path)}, {type(thing).__name__}; "
                "pass them as arguments"
            )
        elif isinstance(thing, CONTENTS):
            size = 0 if isinstance(thing, set) else memoryview(cast(Any, thing)).nbytes
            if size > MOST_BYTES:
                self.refusal = (
                    f"{path} is an array of {size} bytes, too many to compare; make it a tensor"
                )
            else:
                self._add(Place(_content, thing, None, path, users))
        elif isinstance(thing, FunctionType):
            self._visit_function(thing)
        elif isinstance(thing, ModuleType | type):
            self._named_attributes(thing)
        elif isinstance(thing, MethodType):
            self._waiting.append((thing.__func__, path, users))
            self._waiting.append((thing.__self__, type(thing.__self__).__name__, users))
        else:
            self._items(thing, path, users)
            self._attributes(thing, path)

    def _add(self, place: Place) -> None:
        """Note a place, and look at its value later."""
        key = (id(place.holder), place.key)
        if key in self._known or place.path in self.ignored:
            return
        value = place.now()
        if value is MISSING:
            return
        if len(self.places) >= MOST_PLACES:
            self.refusal = (
                f"it can read more than {MOST_PLACES} Python values, such as {place.path}"
            )
            self._waiting.clear()
            return
        self._known.add(key)
        self.places.append(place)
        self.values.append(value)
        self._waiting.append((value, place.path, place.users))

    def _items(self, thing: object, path: str, users: bool) -> None:
        """Note the items of a container, and its size."""
        if isinstance(thing, dict | list | deque) and path not in self.ignored:
            self._sized.append((Place(getattr, thing, None, path, users), thing.copy(), None))
        keys: Iterable[object] = ()
        if isinstance(thing, dict | MappingProxyType):
            keys = list(thing)
        elif isinstance(thing, list | tuple | deque):
            keys = range(len(thing))
        for key in keys:
            self._add(Place(operator.getitem, thing, key, f"{path}[{key!r}]", users))

    def _attributes(self, thing: object, path: str) -> None:
        """Note an object's attributes, its class and what it wraps."""
        variables = getattr(thing, "__dict__", None)
        mro = type(thing).__mro__[:-1]
        classes = [cls for cls in mro if not is_library(cls.__module__)]
        counted = self.code.users_names if len(classes) == len(mro) else self.code.names
        if isinstance(variables, dict):
            counted = counted - INTERNAL
            if isinstance(thing, AutoGuide):
                # It makes them anew in each run, also where the user's code has another thing of that name.
                counted = counted - {"plates"}
            # Nobody gives objects of libraries other attributes, but modules a method or a hook.
            if classes or isinstance(thing, nn.Module):
                self._sized.append(
                    (Place(getattr, variables, thing, path, False), dict(variables), counted)
                )
            if isinstance(thing, nn.Module):
                for key in MODULE_DICTS:
                    self._waiting.append((variables.get(key), f"{path}.{key}", True))
            for key in variables.keys() & counted:
                users = key in self.code.users_names
                self._add(Place(operator.getitem, variables, key, f"{path}.{key}", users))
        if classes:
            self._add(Place(getattr, thing, "__class__", f"{path}.__class__", True))
        for cls in classes:
            self._waiting.append((cls, cls.__name__, True))
            for key, value in vars(cls).items():
                if isinstance(value, MemberDescriptorType):
                    self._add(Place(getattr, thing, key, f"{path}.{key}", True))
        if isinstance(thing, WRAPPERS):
            for name in WRAPPED:
                self._waiting.append((getattr(thing, name, None), path, True))

    def _named_attributes(self, thing: ModuleType | type) -> None:
        """Note the attributes of a Python module or a class that code names."""
        library = is_library(thing.__name__ if isinstance(thing, ModuleType) else thing.__module__)
        counted = self.code.users_names if library else self.code.names
        if isinstance(thing, ModuleType):
            for key in vars(thing).keys() & counted:
                self._add(
                    Place(operator.getitem, vars(thing), key, f"{thing.__name__}.{key}", True)
                )
        elif not library:
            variables = vars(thing)
            self._sized.append(
                (Place(getattr, variables, thing, thing.__name__, True), dict(variables), counted)
            )
            for key, value in list(variables.items()):
                if key in counted or isinstance(value, FunctionType):
                    self._add(Place(_read_class, thing, key, f"{thing.__name__}.{key}", True))

    def _visit_function(self, function: FunctionType) -> None:
        """Note what a function that ran reads: its closure and attributes; a user's defaults and globals too."""
        users = self.code.ran.get(function.__code__)
        if users is None:
            return
        name = function.__qualname__.rpartition(".")[2]
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._add(Place(getattr, cell, "cell_contents", f"{name}'s {key}", users))
        self._attributes(function, name)
        if users:
            for key in ("__defaults__", "__kwdefaults__"):
                if getattr(function, key):
                    self._add(Place(getattr, function, key, f"{name}.{key}", True))
            for key in _globals_in(function.__code__):
                self._add(Place(operator.getitem, function.__globals__, key, f"global {key}", True))


def _globals_in(code: CodeType) -> Iterator[str]:
    """Return the names of global variables in code, also in that of functions inside."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _globals_in(instruction.argval)


def _equal(value: object, now: object) -> bool:
    """Return whether two values are one, or immutable and equal."""
    if value is now:
        return True
    if type(value) is not type(now) or not isinstance(value, (*PLAIN, tuple, frozenset)):
        return False
    if isinstance(value, tuple) and isinstance(now, tuple):
        return len(value) == len(now) and all(map(_equal, value, now))
    return bool(value == now)


def _content(thing: Any, _: None) -> Any:
    """Return a copy of what is in a set, an array or a tensor."""
    if isinstance(thing, Tensor):
        return thing.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.dtype, thing.tobytes()
    return frozenset(thing) if isinstance(thing, set) else bytes(thing)


def _refill(thing: Any, _: None, before: Any) -> None:
    """Give a container, set or array its former content."""
    if isinstance(thing, dict | set | deque):
        thing.clear()
        (thing.extend if isinstance(thing, deque) else thing.update)(before)
    elif isinstance(thing, np.ndarray):
        thing[...] = np.frombuffer(before[2], before[1]).reshape(before[0])
    else:
        thing[:] = array(thing.typecode, before) if isinstance(thing, array) else before


# How a place is written, if not as an attribute.
WRITES: dict[Read, Callable[[Any, Any, Any], Any]] = {
    operator.getitem: operator.setitem,
    _content: _refill,
}
