# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of the public names: valid ones with a check of the result, and values that an argument must refuse.

A table is a module of this folder with a list ``CALLS``. ``test_calls.py`` runs all tables, and compares them with the
signatures of the public names.
"""

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch

import pyro_radial
from tests.helpers.pages import module_of_site

reference = module_of_site("reference")

Values = Mapping[str, Any]  # A value by its name in the test's name; a Lazy one is made when its test runs.


@dataclass(frozen=True)
class Lazy:
    """A value that is made when it is needed."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """A value with a wrong part, such as the value of a site, which the error names instead of the argument."""

    name: str
    value: Any


class Stranger:
    """A value of a type that no argument takes."""

    def __repr__(self) -> str:
        return "<stranger>"


STRANGER = Stranger()
NONE = {"None": None}

# Kinds of arguments, as the values that each of them must refuse; ``kind | {"another": value}`` adds some.
positive_int = {**NONE, "text": "two", "zero": 0, "negative": -1, "fraction": 1.5, "flag": True}
non_negative_int = {**NONE, "text": "two", "negative": -1, "fraction": 1.5, "flag": True}
positive_float = {**NONE, "text": "two", "zero": 0.0, "negative": -1.0, "nan": math.nan, "inf": math.inf, "list": [1.0]}
non_negative_float = {**NONE, "text": "two", "negative": -1.0, "nan": math.nan, "inf": math.inf}
fraction = {**NONE, "text": "half", "zero": 0.0, "one": 1.0, "negative": -0.5, "nan": math.nan}
flag = {**NONE, "text": "yes", "number": 2, "zero": 0}
tensor = {**NONE, "text": "two", "stranger": STRANGER}
shape = {**NONE, "text": "two", "negative": (-1,), "fraction": (1.5,), "stranger": STRANGER}
distribution = {**NONE, "number": 1.0, "text": "normal", "class": dist.Normal}
function = {**NONE, "number": 3, "text": "f"}
module = {**NONE, "number": 3, "text": "net", "class": torch.nn.Linear}
name_of_one = {**NONE, "number": 3, "unknown": "no_such_name"}
text = {**NONE, "number": 3, "stranger": STRANGER}
mapping = {**NONE, "number": 3, "text": "a", "stranger": STRANGER}
path = {**NONE, "number": 3.5, "stranger": STRANGER}


def some(*values: Any) -> Values:
    """Values by their place and type."""
    return {"None" if value is None else f"{place} {type(value).__name__}": value for place, value in enumerate(values)}


def optional(kind: Values) -> Values:
    """The kind of an argument that may be None; a row has then a valid call with None."""
    return {name: value for name, value in kind.items() if name != "None"}


@dataclass(frozen=True)
class Call:
    """A row of a table: one public callable.

    :param name: the public name, from its package on: ``distributions.RadialNormal`` or, for a method,
        ``distributions.RadialNormal.log_prob``.
    :param valid: makes a value for each argument.
    :param check: whether the result of the valid call is right.
    :param invalid: for each argument the values that it must refuse, at least three with None and other valid ones.
    :param also: other valid calls, as changed arguments and a check.
    :param on: for a method, makes the object.
    :param errors: the documented errors.
    :param then: what is done with the result in every call, where an argument is read only then.
    :param unchecked: arguments that the callable passes on as they are, with the reason.
    :param case: tells apart the rows of one name.
    """

    name: str
    valid: Callable[[], dict[str, Any]]
    check: Callable[[Any], Any]
    invalid: Mapping[str, Values] = field(default_factory=dict)
    also: tuple[tuple[dict[str, Any], Callable[[Any], Any]], ...] = ()
    on: Callable[[], Any] | None = None
    errors: tuple[type[Exception], ...] = (TypeError, ValueError)
    then: Callable[[Any], Any] = lambda result: result
    unchecked: Mapping[str, str] = field(default_factory=dict)
    case: str = ""

    @property
    def key(self) -> str:
        """The name, with the case where there are several."""
        return f"{self.name}-{self.case}" if self.case else self.name

    def target(self) -> Any:
        """What is called."""
        return public(self.name) if self.on is None else getattr(self.on(), self.name.rpartition(".")[2])

    def run(self, **changed: Any) -> Any:
        """Call it with its valid arguments, some of them changed."""
        return self.then(call(self.target(), self.valid() | {name: _made(value) for name, value in changed.items()}))


def _made(value: Any) -> Any:
    value = value.value if isinstance(value, Part) else value
    return value.make() if isinstance(value, Lazy) else value


def call(target: Any, arguments: Mapping[str, Any]) -> Any:
    """Call with all arguments by name, except those that have none: ``args`` is a tuple, ``kwargs`` a mapping."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    parameters = inspect.signature(target).parameters.values()
    by_position = any(p.kind is p.VAR_POSITIONAL and p.name in arguments for p in parameters)
    for p in parameters:
        if p.name not in arguments:
            continue
        if p.kind is p.VAR_POSITIONAL:
            positional.extend(arguments[p.name])
        elif p.kind is p.VAR_KEYWORD:
            named.update(arguments[p.name])
        elif p.kind is p.POSITIONAL_ONLY or (by_position and p.kind is p.POSITIONAL_OR_KEYWORD):
            positional.append(arguments[p.name])
        else:
            named[p.name] = arguments[p.name]
    return target(*positional, **named)


def names_argument(error: BaseException, argument: str) -> bool:
    """Whether a message speaks of the argument, and is not Python's own about an argument too many or too few."""
    message = str(error)
    counted = re.search(r"unexpected keyword argument|missing \d+ required|positional arguments? but", message)
    return (
        counted is None and re.search(rf"(?<![A-Za-z0-9_]){re.escape(argument)}(?![A-Za-z0-9_])", message) is not None
    )


def public(name: str) -> Any:
    """What a name means, from ``pyro_radial`` on."""
    found: Any = pyro_radial
    for part in name.split("."):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def callables() -> dict[str, dict[str, list[str]]]:
    """For each page of the reference its callables that take arguments, methods too, with the arguments.

    A result type, which functions return, has methods only.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for package, names in reference.pages().items():
        own = found[package.removeprefix("pyro_radial.")] = {}
        for name in names:
            member = getattr(importlib.import_module(package), name)
            if callable(member):
                own[f"{package}.{name}"] = arguments_of(member)
                own.update(_methods(package, name, member))
        for module, name in reference.AUTOCLASS.findall((reference.PAGES / f"{package}.md").read_text()):
            own.update(_methods(module, name, getattr(importlib.import_module(module), name)))
    return {
        package: {name.removeprefix("pyro_radial."): arguments for name, arguments in own.items() if arguments}
        for package, own in found.items()
    }


def _methods(module: str, name: str, cls: Any) -> dict[str, list[str]]:
    """The arguments of the public methods that a class defines, with a docstring of its own or of a base."""
    return {
        f"{module}.{name}.{method}": arguments_of(getattr(cls, method))
        for method, member in (vars(cls).items() if inspect.isclass(cls) else ())
        if (not method.startswith("_") or method == "__call__")
        and inspect.isroutine(member)
        and inspect.getdoc(getattr(cls, method))
    }


def arguments_of(target: Any) -> list[str]:
    names = inspect.signature(target).parameters
    return [name for name in names if not name.startswith("_") and name != "self"]


def _tables() -> Iterator[Any]:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if not module.name.startswith("test_"):
            yield importlib.import_module(f"{folder}.{module.name}")


def rows() -> dict[str, Call]:
    """The rows of all tables by key."""
    return {row.key: row for table in _tables() for row in getattr(table, "CALLS", ())}


def not_called() -> dict[str, str]:
    """What users define or override and only the library calls, with what it gives them: ``NOT_CALLED`` of a table."""
    return {name: reason for table in _tables() for name, reason in getattr(table, "NOT_CALLED", {}).items()}
