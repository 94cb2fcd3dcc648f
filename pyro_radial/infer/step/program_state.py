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
MOST_SLOTS, MOST_BYTES = 20_000, 4096
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


class UnrecordableError(Exception):
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

        previous_profiler = sys.getprofile()
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(previous_profiler)
        self.user_code = [code for code, is_users in self.ran.items() if is_users]
        self.names = _names_in(self.ran)
        self.user_names = _names_in(self.user_code)

    def line_of(self, path: str) -> str:
        """Return the user's line that stores the last name in a path, else the first line with it, in parentheses."""
        names = re.findall(r"\w+", path)[::-1]
        candidates: list[tuple[Any, ...]] = []
        for number, code in enumerate(self.user_code):
            for instruction in dis.get_instructions(code):
                if instruction.argval in names:
                    stores = instruction.opname.startswith("STORE")
                    order = names.index(instruction.argval), not stores, number
                    candidates.append((*order, code.co_filename, instruction.positions))
        if not candidates:
            return ""
        *_, file, positions = min(candidates)
        return f" ({line(file, positions.lineno)})" if positions else ""


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
    names: set[str] = set()
    constants: list[object] = list(codes)
    for constant in constants:
        if isinstance(constant, CodeType):
            names.update(constant.co_names, constant.co_freevars)
            constants.extend(constant.co_consts)
        elif isinstance(constant, tuple):
            constants.extend(constant)
        elif isinstance(constant, str) and len(constant) < 100:
            names.update(constant.split("."))
    return frozenset(names)


#: A function of a holder and a key that returns the value there.
Getter = Callable[[Any, Any], Any]


class Slot(NamedTuple):
    """Where a value is read, in words too, and whether the user's code names it."""

    getter: Getter
    holder: Any
    key: Any
    path: str
    in_user_code: bool

    def read(self) -> Any:
        """Return the present value."""
        try:
            return self.getter(self.holder, self.key)
        except ABSENT:
            return MISSING

    def write(self, value: object) -> None:
        """Put a value there."""
        SETTERS.get(self.getter, setattr)(self.holder, self.key, value)


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
        parameter_holders: Iterable[tuple[Mapping[str, Any], str]] = (),
        ignored: Collection[str] = (),
        host_read_ids: Collection[int] = (),
    ) -> None:
        self.code = code
        self.ignored = ignored
        self.host_read_ids = host_read_ids
        #: Why there can be no graph; None if nothing speaks against it.
        self.unreadable_reason: str | None = None
        self.slots: list[Slot] = []
        self.values: list[object] = []
        #: Each tensor once, in the order in which it was found.
        self.tensors: list[Tensor] = []
        self._slot_keys: set[tuple[int, object]] = set()
        self._visited: dict[int, object] = {}
        # Containers and the variables of objects with copies, and which new attributes of an object count.
        self._sized_holders: list[tuple[Slot, Any, Collection[str] | None]] = []
        self._to_visit: list[tuple[object, str, bool]] = []
        for name, root in roots.items():
            self._to_visit.append((root, name, False))
        for holder, name in parameter_holders:
            self._add_slot(Slot(operator.getitem, holder, name, f"parameter {name}", False))
        # Tensors of a class of their own may refuse that their attributes are read.
        with DisableTorchFunctionSubclass():
            while self._to_visit:
                self._visit(*self._to_visit.pop())
        self._arrange_comparisons()

    def is_valid(self) -> bool:
        """Return whether all is as it was, apart from tensors that were replaced by their like."""
        with DisableTorchFunctionSubclass():
            return self._is_identical() or self._take_over_replaced_tensors()

    def _is_identical(self) -> bool:
        """Return whether no value, size or tensor is another one."""
        with suppress(*ABSENT):
            for getter, is_same, values, holders, keys in self._comparisons:
                if not all(map(is_same, map(getter, holders, keys), values)):
                    return False
            if list(map(len, self._holders)) != self._sizes:
                return False
            return list(map(FLAGS, self.tensors)) == self._flags
        return False

    def _take_over_replaced_tensors(self) -> bool:
        """Return whether only tensors were replaced by their like, and take these over."""
        if self.changes():
            return False
        current_by_id: dict[int, Any] = {}
        for slot, value in zip(self.slots, self.values, strict=True):
            current_by_id[id(value)] = slot.read()
        self.values = [current_by_id[id(value)] for value in self.values]
        self.tensors = [current_by_id.get(id(tensor), tensor) for tensor in self.tensors]
        self._arrange_comparisons()
        return True

    def changes(self, *, count_replaced: bool = False) -> list[tuple[str, bool]]:
        """Return the path of each changed value, and whether the user's code names it.

        :param count_replaced: whether each replaced tensor counts as a change, also by one with the same properties.
        """
        changes: list[tuple[str, bool]] = []
        current_by_id: dict[int, object] = {}
        with DisableTorchFunctionSubclass():
            flags = dict(zip(map(id, self.tensors), self._flags, strict=True))
            for slot, value in zip(self.slots, self.values, strict=True):
                current = slot.read()
                is_same = _is_unchanged(value, current)
                if isinstance(value, Tensor) and isinstance(current, Tensor):
                    counts = (
                        count_replaced
                        or id(value) in self.host_read_ids
                        or metadata_of(current) != metadata_of(value)
                    )
                    # Two places of one tensor must stay places of one tensor.
                    is_shared = current_by_id.setdefault(id(value), current) is current
                    is_same = (
                        (is_same or not counts) and is_shared and FLAGS(current) == flags[id(value)]
                    )
                if not is_same:
                    changes.append((slot.path, slot.in_user_code))
        for slot, original, counted_names in self._sized_holders:
            if len(slot.holder) != len(original) and counted_names is None:
                changes.append((slot.path, slot.in_user_code))
            elif len(slot.holder) != len(original):
                for key in sorted(counted_names & (slot.holder.keys() - original)):
                    changes.append((f"{slot.path}.{key}", key in self.code.user_names))
        return changes

    def changed_numbers(self) -> list[str]:
        """Return the paths of Python numbers that have changed."""
        paths: list[str] = []
        for slot, value in zip(self.slots, self.values, strict=True):
            current = slot.read()
            if type(value) in (int, float) and type(current) is type(value) and current != value:
                paths.append(slot.path)
        return paths

    def restore(self) -> None:
        """Put all values back."""
        for slot, original, counted_names in self._sized_holders:
            if len(slot.holder) != len(original) and counted_names is None:
                _restore_content(slot.holder, None, original)
            elif len(slot.holder) != len(original):
                for key in slot.holder.keys() - original:
                    delattr(slot.key, key)
        for slot, value in zip(self.slots, self.values, strict=True):
            if not _is_unchanged(value, slot.read()):
                slot.write(value)

    def _arrange_comparisons(self) -> None:
        """Arrange what is compared, for speed: all values that are read alike in three lists."""
        by_getter: dict[Getter, tuple[list[object], list[object], list[object]]] = {}
        for slot, value in zip(self.slots, self.values, strict=True):
            values, holders, keys = by_getter.setdefault(slot.getter, ([], [], []))
            values.append(value)
            holders.append(slot.holder)
            keys.append(slot.key)
        self._comparisons: list[tuple[Any, ...]] = []
        for getter, lists in by_getter.items():
            is_same = operator.eq if getter is _copy_content else operator.is_
            self._comparisons.append((getter, is_same, *lists))
        self._holders = [slot.holder for slot, _, _ in self._sized_holders]
        self._sizes = list(map(len, self._holders))
        with DisableTorchFunctionSubclass():
            self._flags = list(map(FLAGS, self.tensors))

    def _visit(self, value: object, path: str, in_user_code: bool) -> None:
        """Note the places in a thing."""
        if id(value) in self._visited or isinstance(value, (*PLAIN, *OPAQUE)):
            return
        self._visited[id(value)] = value
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self._to_visit.append((value._backward_hooks, f"hooks of {path}", True))
            if id(value) in self.host_read_ids:
                self._add_slot(Slot(_copy_content, value, None, path, in_user_code))
        elif (
            isinstance(value, ONCE)
            and in_user_code
            and not any(value is seeded for seeded in SEEDED)
        ):
            self.unreadable_reason = (
                f"it takes values from {path}{self.code.line_of(path)}, {type(value).__name__}; "
                "pass them as arguments"
            )
        elif isinstance(value, CONTENTS):
            size = 0 if isinstance(value, set) else memoryview(cast(Any, value)).nbytes
            if size > MOST_BYTES:
                self.unreadable_reason = (
                    f"{path} is an array of {size} bytes, too many to compare; make it a tensor"
                )
            else:
                self._add_slot(Slot(_copy_content, value, None, path, in_user_code))
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, ModuleType | type):
            self._add_named_attributes(value)
        elif isinstance(value, MethodType):
            self._to_visit.append((value.__func__, path, in_user_code))
            self._to_visit.append((value.__self__, type(value.__self__).__name__, in_user_code))
        else:
            self._add_items(value, path, in_user_code)
            self._add_attributes(value, path)

    def _add_slot(self, slot: Slot) -> None:
        """Note a place, and look at its value later."""
        key = (id(slot.holder), slot.key)
        if key in self._slot_keys or slot.path in self.ignored:
            return
        value = slot.read()
        if value is MISSING:
            return
        if len(self.slots) >= MOST_SLOTS:
            self.unreadable_reason = (
                f"it can read more than {MOST_SLOTS} Python values, such as {slot.path}"
            )
            self._to_visit.clear()
            return
        self._slot_keys.add(key)
        self.slots.append(slot)
        self.values.append(value)
        self._to_visit.append((value, slot.path, slot.in_user_code))

    def _add_items(self, container: object, path: str, in_user_code: bool) -> None:
        """Note the items of a container, and its size."""
        if isinstance(container, dict | list | deque) and path not in self.ignored:
            self._sized_holders.append(
                (Slot(getattr, container, None, path, in_user_code), container.copy(), None)
            )
        keys: Iterable[object] = ()
        if isinstance(container, dict | MappingProxyType):
            keys = list(container)
        elif isinstance(container, list | tuple | deque):
            keys = range(len(container))
        for key in keys:
            self._add_slot(Slot(operator.getitem, container, key, f"{path}[{key!r}]", in_user_code))

    def _add_attributes(self, owner: object, path: str) -> None:
        """Note an object's attributes, its class and what it wraps."""
        variables = getattr(owner, "__dict__", None)
        mro = type(owner).__mro__[:-1]
        classes = [cls for cls in mro if not is_library(cls.__module__)]
        counted_names = self.code.user_names if len(classes) == len(mro) else self.code.names
        if isinstance(variables, dict):
            counted_names = counted_names - INTERNAL
            if isinstance(owner, AutoGuide):
                # It makes them anew in each run, also where the user's code has another thing of that name.
                counted_names = counted_names - {"plates"}
            # Nobody gives objects of libraries other attributes, but modules a method or a hook.
            if classes or isinstance(owner, nn.Module):
                self._sized_holders.append(
                    (Slot(getattr, variables, owner, path, False), dict(variables), counted_names)
                )
            if isinstance(owner, nn.Module):
                for key in MODULE_DICTS:
                    self._to_visit.append((variables.get(key), f"{path}.{key}", True))
            for key in variables.keys() & counted_names:
                in_user_code = key in self.code.user_names
                self._add_slot(
                    Slot(operator.getitem, variables, key, f"{path}.{key}", in_user_code)
                )
        if classes:
            self._add_slot(Slot(getattr, owner, "__class__", f"{path}.__class__", True))
        for cls in classes:
            self._to_visit.append((cls, cls.__name__, True))
            for key, value in vars(cls).items():
                if isinstance(value, MemberDescriptorType):
                    self._add_slot(Slot(getattr, owner, key, f"{path}.{key}", True))
        if isinstance(owner, WRAPPERS):
            for name in WRAPPED:
                self._to_visit.append((getattr(owner, name, None), path, True))

    def _add_named_attributes(self, owner: ModuleType | type) -> None:
        """Note the attributes of a Python module or a class that code names."""
        library = is_library(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__)
        counted_names = self.code.user_names if library else self.code.names
        if isinstance(owner, ModuleType):
            for key in vars(owner).keys() & counted_names:
                self._add_slot(
                    Slot(operator.getitem, vars(owner), key, f"{owner.__name__}.{key}", True)
                )
        elif not library:
            variables = vars(owner)
            self._sized_holders.append(
                (
                    Slot(getattr, variables, owner, owner.__name__, True),
                    dict(variables),
                    counted_names,
                )
            )
            for key, value in list(variables.items()):
                if key in counted_names or isinstance(value, FunctionType):
                    self._add_slot(Slot(_read_class, owner, key, f"{owner.__name__}.{key}", True))

    def _visit_function(self, function: FunctionType) -> None:
        """Note what a function that ran reads: its closure and attributes; a user's defaults and globals too."""
        in_user_code = self.code.ran.get(function.__code__)
        if in_user_code is None:
            return
        name = function.__qualname__.rpartition(".")[2]
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._add_slot(Slot(getattr, cell, "cell_contents", f"{name}'s {key}", in_user_code))
        self._add_attributes(function, name)
        if in_user_code:
            for key in ("__defaults__", "__kwdefaults__"):
                if getattr(function, key):
                    self._add_slot(Slot(getattr, function, key, f"{name}.{key}", True))
            for key in _globals_in(function.__code__):
                self._add_slot(
                    Slot(operator.getitem, function.__globals__, key, f"global {key}", True)
                )


def _globals_in(code: CodeType) -> Iterator[str]:
    """Return the names of global variables in code, also in that of functions inside."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _globals_in(instruction.argval)


def _is_unchanged(value: object, current: object) -> bool:
    """Return whether two values are one, or immutable and equal."""
    if value is current:
        return True
    if type(value) is not type(current) or not isinstance(value, (*PLAIN, tuple, frozenset)):
        return False
    if isinstance(value, tuple) and isinstance(current, tuple):
        return len(value) == len(current) and all(map(_is_unchanged, value, current))
    return bool(value == current)


def _copy_content(holder: Any, _: None) -> Any:
    """Return a copy of what is in a set, an array or a tensor."""
    if isinstance(holder, Tensor):
        return holder.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(holder, np.ndarray):
        return holder.shape, holder.dtype, holder.tobytes()
    return frozenset(holder) if isinstance(holder, set) else bytes(holder)


def _restore_content(holder: Any, _: None, content: Any) -> None:
    """Give a container, set or array its former content."""
    if isinstance(holder, dict | set | deque):
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(content)
    elif isinstance(holder, np.ndarray):
        holder[...] = np.frombuffer(content[2], content[1]).reshape(content[0])
    else:
        holder[:] = array(holder.typecode, content) if isinstance(holder, array) else content


# How a place is written, if not as an attribute.
SETTERS: dict[Getter, Callable[[Any, Any, Any], Any]] = {
    operator.getitem: operator.setitem,
    _copy_content: _restore_content,
}
