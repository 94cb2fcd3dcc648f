# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Find the Python state that a program reads while it runs, and compare it before its graph is replayed."""

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
from weakref import ReferenceType

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
CONTENTS = (set, bytearray, memoryview, array, np.ndarray)
# The generators of whole modules; recording refuses a program that draws from them.
HOST_GENERATORS = (random.random.__self__, np.random.random.__self__)  # type: ignore[attr-defined]
# Iterators and generators of random numbers, whose next value cannot be read without a change of their state.
ONCE = (Iterator, random.Random, np.random.Generator, np.random.RandomState)

# Objects that no program reads for its loss: those of training, traces that guides keep, files and logs.
OPAQUE = (Trace, PyroOptim, Optimizer, io.IOBase, logging.Logger)
# Packages that keep no state for a program in globals and classes.
FRAMEWORKS = frozenset({"torch", "pyro", "pyro_radial", "numpy", "opt_einsum", "sympy", "mpmath"})
# The machinery of imports and of type hints runs whenever something is imported for the first time.
MACHINERY = {"_distutils_hack", "setuptools", "typing_extensions"}
LIBRARIES = FRAMEWORKS | MACHINERY | sys.stdlib_module_names
# With more slots, or with larger arrays, comparing takes longer than a step.
MOST_SLOTS, MOST_BYTES = 20_000, 4096
MISSING = object()
ABSENT = (KeyError, IndexError, AttributeError, ValueError, LookupError)
FLAGS = operator.attrgetter("requires_grad", "_backward_hooks")
# Objects that hold functions, and the attributes that hold them.
WRAPPERS = (partial, property, classmethod, staticmethod, cached_property, type(lru_cache(print)))
WRAPPED = ("func", "args", "keywords", "fget", "__func__", "__wrapped__")
# Attributes that every module or distribution of torch and Pyro has. ``training`` and the dicts below count though.
INTERNAL = frozenset(vars(PyroModule())) - {"training"} | {
    "_batch_shape",
    "_event_shape",
    "_validate_args",
}
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
MODULE_DICTS = ("_parameters", "_buffers", "_modules", "_pyro_samples", *MODULE_HOOKS)


class Refused(Exception):
    """A program cannot be a graph, or a step cannot be captured.

    :param reason: the reason in words, for warnings.
    :param may_try_again: whether a later run may be recorded, because the first run may do more than later ones.
    :param read_numbers: the positions and paths of the numbers that Python read, if they are the reason.
    """

    def __init__(
        self,
        reason: str,
        *,
        may_try_again: bool = False,
        read_numbers: Collection[int | str] = (),
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.may_try_again = may_try_again
        self.read_numbers = read_numbers


def first_line(error: BaseException) -> str:
    """Return the first line of an error, as the reason why there is no graph or no code."""
    reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return reason.splitlines()[0]


class IdentityMap:
    """Values by objects, which are compared by identity, so they need no hash.

    The map keeps the objects alive, because Python may give the id of a deleted object to a new one.
    """

    def __init__(self, pairs: Iterable[tuple[object, Any]] = ()) -> None:
        self._pairs = {id(key): (key, value) for key, value in pairs}

    def setdefault(self, key: object, value: Any) -> Any:
        """Return the value of an object; an object without one gets this value."""
        return self._pairs.setdefault(id(key), (key, value))[1]


class Metadata(NamedTuple):
    """The properties of a tensor that compiled code depends on."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def is_contiguous(self) -> bool:
        """Return whether elements lie in memory in their order."""
        return self.stride == torch.empty(self.shape, device="meta").stride()

    def empty(self) -> Tensor:
        """Return new memory for such a tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def metadata_of(tensor: Tensor) -> Metadata:
    """Return the properties of a tensor that compiled code depends on."""
    return Metadata(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class Code:
    """The code that ran in a :meth:`watch` block, and the names in it.

    After the block, ``user_code`` has the part that is not of a library. ``names`` and ``user_names`` have the names in
    all code and in the user's code.
    """

    def __init__(self) -> None:
        self.ran: dict[CodeType, bool] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the code that runs in the block."""

        def note(frame: FrameType, event: str, _: object) -> None:
            # Bodies of modules and classes are left out: they run when a library first imports something.
            if (
                event == "call"
                and frame.f_code.co_flags & inspect.CO_OPTIMIZED
                and frame.f_code not in self.ran
            ):
                self.ran[frame.f_code] = not is_library(frame.f_globals.get("__name__"))

        previous: Any = sys.getprofile()
        set_hook: Any = sys.setprofile
        if previous is not None and not callable(previous):
            # Python cannot set a profiler written in C again, such as cProfile's; a trace function sees the same calls.
            previous, set_hook = sys.gettrace(), sys.settrace
        set_hook(note)
        try:
            yield
        finally:
            set_hook(previous)
        self.user_code = [code for code, is_users in self.ran.items() if is_users]
        self.names = _names_in(self.ran)
        self.user_names = _names_in(self.user_code)

    def line_of(self, path: str) -> str:
        """Return the line of the user's code that a path of the state points to, in parentheses, or an empty string.

        It is a line that stores the last name in the path if there is one, else a line that reads it, else a line with
        an earlier name.
        """
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
    """Return the name of a file and the number of a line, for a message."""
    return f"{Path(file).name}, line {number}"


def is_library(module: object) -> bool:
    """Return whether a module of this name belongs to a library, not to the user."""
    # The code of named tuples has such a module name.
    return isinstance(module, str) and (
        module.partition(".")[0] in LIBRARIES or module.startswith("namedtuple_")
    )


def _names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return all names and short strings in code and in the functions that it defines."""
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


#: A function of a holder and a key that returns the value, such as ``getattr``.
Getter = Callable[[Any, Any], Any]


class Slot(NamedTuple):
    """Where a value of the state is stored: an attribute, an item, a closure's cell or the content of an array.

    ``path`` names the slot in messages, and ``in_user_code`` says whether the user's code has this name.
    """

    getter: Getter
    holder: Any
    key: Any
    path: str
    in_user_code: bool

    def read(self) -> Any:
        """Return the current value, or ``MISSING`` if it was deleted."""
        try:
            return self.getter(self.holder, self.key)
        except ABSENT:
            return MISSING

    def write(self, value: object) -> None:
        """Store a value in the slot."""
        SETTERS.get(self.getter, setattr)(self.holder, self.key, value)


def _read_class(holder: type, key: str) -> Any:
    """Return an attribute as it is stored in a class, where ``getattr`` would bind methods and search base classes."""
    return vars(holder)[key]


class State:
    """The values that a program can read, found by a walk from its model, guide and loss through all that they hold.

    The walk takes attributes that the code which ran names, closures and globals of functions which ran, and all items
    of containers. Of a tensor it takes shape, dtype, ``requires_grad`` and hooks. It does not take the numbers in a
    tensor, because a graph reads these itself, unless Python has read them too.

    :param roots: the objects that the walk starts from, by name.
    :param parameter_holders: the mapping that holds each parameter, and its name there.
    :param ignored: paths that are not compared.
    :param host_reads: the tensors with numbers that Python has read.
    """

    def __init__(
        self,
        roots: Mapping[str, object],
        code: Code,
        parameter_holders: Iterable[tuple[Mapping[str, Any], str]] = (),
        ignored: Collection[str] = (),
        host_reads: Collection[Tensor] = frozenset(),
    ) -> None:
        self.code = code
        self.ignored = ignored
        self.host_reads = host_reads
        #: Why the state cannot be compared, so that there can be no graph; None if it can be compared.
        self.unreadable_reason: str | None = None
        self.slots: list[Slot] = []
        self.values: list[object] = []
        #: Each tensor once, in the order in which it was found.
        self.tensors: list[Tensor] = []
        # The keys of the slots of each holder, and the paths by which each object was visited.
        self._slot_keys = IdentityMap()
        self._visits = IdentityMap()
        # Containers, and the variables of objects, each with a copy, to find new and deleted entries. For objects the
        # names of new attributes that count; None where all entries count. The key of such a slot is the object.
        self._sized_holders: list[tuple[Slot, Any, Collection[str] | None]] = []
        self._to_visit = [(root, name, False) for name, root in roots.items()]
        for holder, name in parameter_holders:
            self._add_slot(Slot(operator.getitem, holder, name, f"parameter {name}", False))
        # Subclasses of Tensor may raise an error when their attributes are read.
        with DisableTorchFunctionSubclass():
            while self._to_visit:
                self._visit(*self._to_visit.pop())
        self._arrange_comparisons()

    def is_valid(self) -> bool:
        """Return whether the state is unchanged.

        A tensor that was replaced by one with the same properties does not count as a change; the state then refers to
        the new tensor.
        """
        with DisableTorchFunctionSubclass():
            return self._is_identical() or self._take_over_replaced_tensors()

    def _is_identical(self) -> bool:
        """Return whether all values and tensors are the same objects, and containers have the same sizes."""
        with suppress(*ABSENT):
            for getter, is_same, values, holders, keys in self._comparisons:
                if not all(map(is_same, map(getter, holders, keys), values)):
                    return False
            if list(map(len, self._holders)) != self._sizes:
                return False
            return list(map(FLAGS, self.tensors)) == self._flags
        return False

    def _take_over_replaced_tensors(self) -> bool:
        """Refer to the new tensors if tensors with the same properties are the only change; else return False."""
        if self.changes():
            return False
        replacements = IdentityMap(zip(self.values, map(Slot.read, self.slots), strict=True))
        self.values = [replacements.setdefault(value, value) for value in self.values]
        self.tensors = [replacements.setdefault(tensor, tensor) for tensor in self.tensors]
        self._arrange_comparisons()
        return True

    def changes(self, *, count_replaced: bool = False) -> list[tuple[str, bool]]:
        """Return the path of each changed value, and whether the user's code names it.

        :param count_replaced: whether each replaced tensor counts as a change, also by one with the same properties.
        """
        changes: list[tuple[str, bool]] = []
        replacements = IdentityMap()
        with DisableTorchFunctionSubclass():
            flags = dict(zip(self.tensors, self._flags, strict=True))
            for slot, value in zip(self.slots, self.values, strict=True):
                current = slot.read()
                is_same = _is_unchanged(value, current)
                if isinstance(value, Tensor) and isinstance(current, Tensor):
                    is_replacement_a_change = (
                        count_replaced
                        or value in self.host_reads
                        or metadata_of(current) != metadata_of(value)
                    )
                    # Slots that shared a tensor must still share one.
                    is_shared = replacements.setdefault(value, current) is current
                    is_same = (
                        (is_same or not is_replacement_a_change)
                        and is_shared
                        and FLAGS(current) == flags[value]
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
        """Write all values back to their slots, and remove entries that are new."""
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
        """Prepare fast comparisons: for each getter, lists of the values, the holders and the keys."""
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
        """Add the slots of an object to the state, and its values to the objects to visit."""
        # A subclass of a number or a string may have attributes.
        is_plain = type(value) in PLAIN or isinstance(value, np.generic)
        visits = self._visits.setdefault(value, [])
        if visits or is_plain or isinstance(value, OPAQUE):
            return
        visits.append(path)
        if isinstance(value, Tensor):
            self.tensors.append(value)
            if value in self.host_reads:
                self._add_slot(Slot(_copy_content, value, None, path, in_user_code))
        elif (
            isinstance(value, ONCE)
            and in_user_code
            and not any(value is generator for generator in HOST_GENERATORS)
        ):
            self.unreadable_reason = (
                f"it takes values from {path}{self.code.line_of(path)}, {type(value).__name__}; "
                "pass them as arguments"
            )
        elif isinstance(value, CONTENTS) and not _holds_objects(value):
            size = 0 if isinstance(value, set) else memoryview(cast(Any, value)).nbytes
            if size > MOST_BYTES:
                self.unreadable_reason = (
                    f"{path} is an array of {size} bytes, too many to compare; make it a tensor"
                )
            else:
                self._add_slot(Slot(_copy_content, value, None, path, in_user_code))
            if isinstance(value, set):
                self._visit_elements(value, path, in_user_code)
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
        """Add a slot with its current value, which is visited later."""
        keys = self._slot_keys.setdefault(slot.holder, set())
        if slot.key in keys or slot.path in self.ignored:
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
        keys.add(slot.key)
        self.slots.append(slot)
        self.values.append(value)
        self._to_visit.append((value, slot.path, slot.in_user_code))

    def _add_items(self, container: object, path: str, in_user_code: bool) -> None:
        """Add a slot for each item of a container, and note its size."""
        if isinstance(container, dict | list | deque) and path not in self.ignored:
            self._sized_holders.append(
                (Slot(getattr, container, None, path, in_user_code), container.copy(), None)
            )
        keys: Iterable[object] = ()
        if isinstance(container, dict | MappingProxyType):
            keys = list(container)
            self._visit_elements(keys, path, in_user_code)
        elif isinstance(container, frozenset):
            self._visit_elements(container, path, in_user_code)
        elif isinstance(container, ReferenceType):
            self._visit_elements([container()], path, in_user_code)
        elif isinstance(container, np.ndarray):
            keys = np.ndindex(container.shape)
        elif isinstance(container, list | tuple | deque):
            keys = range(len(container))
        for key in keys:
            self._add_slot(Slot(operator.getitem, container, key, f"{path}[{key!r}]", in_user_code))

    def _visit_elements(self, elements: Iterable[object], path: str, in_user_code: bool) -> None:
        """Visit objects that have no key of their own in a container, later."""
        for element in elements:
            self._to_visit.append((element, f"an element of {path}", in_user_code))

    def _add_attributes(self, owner: object, path: str) -> None:
        """Add slots for an object's attributes that code names and for its class, and visit functions that it wraps.

        Its variables are copied if new ones count as a change.
        """
        variables = getattr(owner, "__dict__", None)
        mro = type(owner).__mro__[:-1]
        classes = [cls for cls in mro if not is_library(cls.__module__)]
        # Code of libraries reads no attributes of an object with user's classes alone.
        counted_names = self.code.user_names if len(classes) == len(mro) else self.code.names
        if isinstance(variables, dict):
            counted_names = counted_names - INTERNAL
            if isinstance(owner, AutoGuide):
                # Every run of an AutoGuide assigns its plates. That is no change, even where user's code has this name.
                counted_names = counted_names - {"plates"}
            # Users add attributes to their own objects, and methods or hooks to modules, but not to other objects of
            # libraries, so only these are searched for new attributes.
            if classes or isinstance(owner, nn.Module):
                self._sized_holders.append(
                    (Slot(getattr, variables, owner, path, False), dict(variables), counted_names)
                )
            if isinstance(owner, nn.Module):
                # A change of these is one by the user, whoever reads them.
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
        """Add slots for the attributes of a Python module or a class that code names, and for a class's functions."""
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
        """Add slots for what a function that ran can read: closure, attributes, and for a user's function globals."""
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
    """Return the names of global variables in code and in the functions that it defines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _globals_in(instruction.argval)


def _holds_objects(value: object) -> bool:
    """Return whether a value is an array of Python objects."""
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def _is_unchanged(value: object, current: object) -> bool:
    """Return whether two values are the same object, or immutable and equal."""
    if value is current:
        return True
    if type(value) is not type(current) or not isinstance(value, (*PLAIN, tuple, frozenset)):
        return False
    if isinstance(value, tuple) and isinstance(current, tuple):
        return len(value) == len(current) and all(map(_is_unchanged, value, current))
    return bool(value == current)


def _copy_content(holder: Any, _: None) -> Any:
    """Return an immutable copy of the content of a set, an array or a tensor; the getter of slots for contents."""
    if isinstance(holder, Tensor):
        return holder.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(holder, np.ndarray):
        return holder.shape, holder.dtype, holder.tobytes()
    return frozenset(holder) if isinstance(holder, set) else bytes(holder)


def _restore_content(holder: Any, _: None, content: Any) -> None:
    """Give a container, set or array the content that it had when it was copied."""
    if isinstance(holder, dict | set | deque):
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(content)
    elif isinstance(holder, np.ndarray):
        holder[...] = np.frombuffer(content[2], content[1]).reshape(content[0])
    else:
        holder[:] = array(holder.typecode, content) if isinstance(holder, array) else content


# The function that writes to slots with a getter; all others are written by ``setattr``.
SETTERS: dict[Getter, Callable[[Any, Any, Any], Any]] = {
    operator.getitem: operator.setitem,
    _copy_content: _restore_content,
}
