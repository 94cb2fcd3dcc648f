# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of all public names: a valid one each, and faulty ones that are made from annotations and docstrings.

A table is a module of this folder with a list ``ROWS``. A row has what no annotation tells: valid values of arguments
without a default, faults of one argument alone (``extra``), and what an argument takes after all (``takes``).
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyro_radial
from tests.calls.faults import Values, faults
from tests.helpers.pages import module_of_site

reference = module_of_site("reference")

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Lazy:
    """A value that is made when it is needed."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Part:
    """A value with a wrong part, such as the value of a site, which the error names instead of the argument."""

    name: str
    value: Any


@dataclass(frozen=True)
class Row:
    """One public callable.

    :param name: the public name, from its package on: ``distributions.RadialNormal`` or, for a method,
        ``distributions.RadialNormal.log_prob``.
    :param valid: makes valid values; the other arguments keep their defaults.
    :param extra: for some arguments further faults, by their names.
    :param takes: for some arguments the names of generated faults that they take.
    :param unread: arguments that the callable passes on as they are.
    :param on: for a method, makes the object.
    :param then: what is done with the result in every call, where an argument is read only then.
    :param errors: the documented errors.
    :param case: tells apart the rows of one name.
    """

    name: str
    valid: Callable[[], dict[str, Any]] = dict
    extra: Mapping[str, Values] = field(default_factory=dict)
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    on: Callable[[], Any] | None = None
    then: Callable[[Any], Any] = lambda result: result
    errors: tuple[type[Exception], ...] = (TypeError, ValueError)
    case: str = ""

    @property
    def key(self) -> str:
        """The name, with the case where there are several."""
        return f"{self.name}-{self.case}" if self.case else self.name

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments that are checked: all that have a name, but those that are only passed on."""
        target = public(self.name)
        parameters = inspect.signature(target).parameters
        checked = [name for name in arguments_of(target) if name not in self.unread]
        return {name: parameters[name] for name in checked if parameters[name].kind not in VARIADIC}

    def arguments(self) -> dict[str, Any]:
        """Valid arguments; nothing shows its progress."""
        quiet = {"progress": False} if "progress" in self.parameters() else {}
        return quiet | self.valid()

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """Call it, with lazy values made."""
        target = public(self.name) if self.on is None else getattr(self.on(), self.name.rpartition(".")[2])
        return self.then(call(target, {name: made(value) for name, value in arguments.items()}))

    def faults(self, argument: str) -> Values:
        """The values that an argument must refuse."""
        parameter = self.parameters()[argument]
        valid = made(self.arguments().get(argument, parameter.default))
        text = described(public(self.name), argument)
        optional = parameter.default is None
        generated = faults(argument, parameter.annotation, valid, text, optional=optional)
        for label in self.takes.get(argument, ()):
            del generated[label]
        return generated | self.extra.get(argument, {})


def some(*values: Any) -> Values:
    """Values by their place and type."""
    return {f"{place} {type(value).__name__}": value for place, value in enumerate(values)}


def made(value: Any) -> Any:
    """A value to call with."""
    value = value.value if isinstance(value, Part) else value
    return value.make() if isinstance(value, Lazy) else value


def described(target: Any, argument: str) -> str:
    """What a docstring says of an argument."""
    text = inspect.getdoc(target) or ""
    found = re.search(rf":param {argument}: (.*?)(?=\n:|\n\n|\Z)", text, re.DOTALL)
    return "" if found is None else " ".join(found[1].split())


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


def callables() -> dict[str, set[str]]:
    """For each page of the reference its callables that take arguments, methods too.

    A result type, which functions return, has methods only.
    """
    found: dict[str, set[str]] = {}
    for package, names in reference.pages().items():
        own = found[package.removeprefix("pyro_radial.")] = set()
        for name in names:
            member = getattr(importlib.import_module(package), name)
            if callable(member):
                own |= with_arguments({f"{package}.{name}": member})
                own |= with_arguments(methods(package, name, member))
        for module, name in reference.AUTOCLASS.findall((reference.PAGES / f"{package}.md").read_text()):
            own |= with_arguments(methods(module, name, getattr(importlib.import_module(module), name)))
    return found


def with_arguments(members: Mapping[str, Any]) -> set[str]:
    return {name.removeprefix("pyro_radial.") for name, member in members.items() if arguments_of(member)}


def methods(module: str, name: str, cls: Any) -> dict[str, Any]:
    """The public methods that a class defines, with a docstring of its own or of a base."""
    return {
        f"{module}.{name}.{method}": getattr(cls, method)
        for method, member in (vars(cls).items() if inspect.isclass(cls) else ())
        if (not method.startswith("_") or method == "__call__")
        and inspect.isroutine(member)
        and inspect.getdoc(getattr(cls, method))
    }


def arguments_of(target: Any) -> list[str]:
    names = inspect.signature(target).parameters
    return [name for name in names if not name.startswith("_") and name != "self"]


def tables() -> Iterator[Any]:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if not module.name.startswith("test_"):
            yield importlib.import_module(f"{folder}.{module.name}")


def rows() -> dict[str, Row]:
    """The rows of all tables by key."""
    return {row.key: row for table in tables() for row in getattr(table, "ROWS", ())}


def not_called() -> set[str]:
    """What users define or override and only the library calls: ``NOT_CALLED`` of a table."""
    return {name for table in tables() for name in getattr(table, "NOT_CALLED", ())}
