# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of all public names: a valid call each, and faulty values that are made from a valid value and the docstring.

A table is a module of this folder with a list ``ROWS``. Faulty are numbers out of range, tensors of another shape,
NaN, and names that are none of the choices. No value of another type is tried: Python, torch or Pyro refuses it.
"""

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import pyro_radial

Values = dict[str, Any]  # Faulty values by the name of the fault.
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
#: Strings that may be anything; every other string is one of a few.
FREE_TEXT = {"name", "of", "exclude", "checkpoint"}
#: Numbers that may be zero or have any sign, and numbers with a bound, where the docstring does not say so.
FROM_ZERO = {"kl_weight", "weight_space_kl", "noise", "observation_noise", "tolerance", "num_steps", "head"}
FROM_ZERO |= {"initial_pulls", "mean_only_epochs", "event_dim", "i", "index", "seed", "margin", "random_state"}
REAL = {"mean", "low", "high", "threshold", "factor"}
BELOW_ONE = {"validation_fraction"}
BETWEEN = {"level", "init_mean_cosine", "pi"}
#: Tensors that have a row for each row of another argument.
ROW_BY_ROW = {"labels", "targets", "y", "upper", "uncertainty", "observed"}


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
    :param on: for a method, makes the object.
    :param then: what is done with the result in every call, where an argument is read only then.
    :param errors: the documented errors.
    :param case: tells apart the rows of one name.
    """

    name: str
    valid: Callable[[], dict[str, Any]] = dict
    extra: Mapping[str, Values] = field(default_factory=dict)
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    on: Callable[[], Any] | None = None
    then: Callable[[Any], Any] = lambda result: result
    errors: tuple[type[Exception], ...] = (TypeError, ValueError)
    case: str = ""

    @property
    def key(self) -> str:
        """The name, with the case where there are several."""
        return f"{self.name}-{self.case}" if self.case else self.name

    def run(self, changes: Mapping[str, Any]) -> Any:
        """Call it with valid arguments, some of them changed."""
        target = public(self.name) if self.on is None else getattr(self.on(), self.name.rpartition(".")[2])
        arguments = self.valid() | dict(changes)
        if "progress" in inspect.signature(target).parameters:
            arguments = {"progress": False} | arguments
        return self.then(call(target, {name: made(value) for name, value in arguments.items()}))

    def faults(self) -> dict[str, Values]:
        """For each argument the values that it must refuse."""
        target = public(self.name)
        valid = self.valid()
        faults: dict[str, Values] = {}
        for name, parameter in inspect.signature(target).parameters.items():
            if name.startswith("_") or name == "self" or parameter.kind in VARIADIC:
                continue
            value = made(valid.get(name, parameter.default))
            generated = faulty_values(name, parameter.annotation, value, described(target, name))
            for label in self.takes.get(name, ()):
                del generated[label]
            faults[name] = generated
        return faults | {name: faults.get(name, {}) | values for name, values in self.extra.items()}


def faulty_values(argument: str, annotation: Any, valid: Any, text: str) -> Values:
    """Return the values that an argument must refuse.

    :param argument: its name.
    :param annotation: its annotation.
    :param valid: a valid value, which alone decides where the annotation is ``Any``.
    :param text: what its docstring says of it.
    """
    kinds = kinds_of(annotation)
    if kinds == {"Any"}:
        kinds = {type(valid).__name__}
    values: Values = {}
    if kinds & {"str", "Literal"} and not kinds & {"PathLike", "Path"} and argument not in FREE_TEXT:
        values["no such name"] = "no such name"
    if "int" in kinds:
        values |= whole_numbers(argument, text)
    if "float" in kinds:
        values |= numbers(argument, text)
    if isinstance(valid, torch.Tensor):
        values |= tensors(argument, valid)
    elif isinstance(valid, tuple) and len(valid) == 2 and all(isinstance(value, torch.Tensor) for value in valid):
        values |= pairs(*valid)
    elif argument.endswith("shape") or isinstance(valid, torch.Size):
        values["negative size"] = (-1,)
    elif isinstance(valid, list | tuple):
        values["empty"] = type(valid)()
    return values


def kinds_of(annotation: Any) -> set[str]:
    """Return the types that an annotation allows, by their last names."""
    text = inspect.formatannotation(annotation).strip("'")
    union = re.fullmatch(r"(?:typing\.)?(?:Optional|Union)\[(.*)\]", text)
    text = union[1] if union else text
    while "[" in text:
        text = re.sub(r"\[[^\[\]]*\]", "", text)
    return set(re.findall(r"\w+(?= *(?:[|,]|$))", text)) - {"None"}


def numbers(argument: str, text: str) -> Values:
    """Return real numbers out of range."""
    values: Values = {"nan": math.nan, "inf": math.inf}
    if argument in REAL:
        return values
    values["negative"] = -1.0
    if argument in BETWEEN | BELOW_ONE or re.search("between (0|zero) and (1|one)", text):
        values["one"] = 1.0
    if argument not in FROM_ZERO | BELOW_ONE and not re.search("not negative|at least 0|zero for none", text):
        values["zero"] = 0.0
    return values


def whole_numbers(argument: str, text: str) -> Values:
    """Return whole numbers out of range."""
    stated = re.search(r"at least (\d+)", text)
    least = 0 if argument in FROM_ZERO else 1
    least = int(stated[1]) if stated else least
    values: Values = {"negative": -1, "below the least": least - 1}
    if argument == "seed":
        values["too long"] = 2**70
    return values


def tensors(argument: str, valid: torch.Tensor) -> Values:
    """Return tensors with NaN, labels of no class, and other shapes."""
    values: Values = {"all nan": valid * math.nan} if valid.is_floating_point() else {}
    if valid.dim() > 0:
        values |= {"no rows": valid[:0], "a dimension too few": valid[..., 0]}
    if argument in ROW_BY_ROW:
        values["a row too few"] = valid[:-1]
    if argument == "labels":
        values |= {"below zero": valid - 10, "too large": valid + 10}
        values["one-hot"] = torch.eye(10, dtype=torch.long)[valid]
    if argument == "probs":
        values |= {"sum of two": 2 * valid, "negative": valid - 0.5}
    return values


def pairs(x: torch.Tensor, y: torch.Tensor) -> Values:
    """Return inputs and targets that do not fit, or have NaN."""
    values = {"a row too few": (x, y[:-1]), "no rows": (x[:0], y[:0]), "nan": (x * math.nan, y)}
    return values | ({"nan targets": (x, y * math.nan)} if y.is_floating_point() else {})


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
    match = re.search(rf":param {argument}: (.*?)(?=\n:|\n\n|\Z)", text, re.DOTALL)
    return "" if match is None else " ".join(match[1].split())


def call(target: Any, arguments: Mapping[str, Any]) -> Any:
    """Call with all arguments by name, except those that have none: ``args`` is a tuple."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for p in inspect.signature(target).parameters.values():
        if p.name not in arguments:
            continue
        if p.kind is p.VAR_POSITIONAL:
            positional.extend(arguments[p.name])
        elif p.kind is p.VAR_KEYWORD:
            named.update(arguments[p.name])
        elif p.kind is p.POSITIONAL_ONLY or ("args" in arguments and p.kind is p.POSITIONAL_OR_KEYWORD):
            positional.append(arguments[p.name])
        else:
            named[p.name] = arguments[p.name]
    return target(*positional, **named)


def names_argument(error: BaseException, argument: str) -> bool:
    """Whether a message speaks of the argument."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(argument)}(?![A-Za-z0-9_])", str(error)) is not None


def public(name: str) -> Any:
    """What a name means, from ``pyro_radial`` on."""
    member: Any = pyro_radial
    for part in name.split("."):
        if inspect.ismodule(member) and not hasattr(member, part):
            importlib.import_module(f"{member.__name__}.{part}")
        member = getattr(member, part)
    return member


def tables() -> Iterator[Any]:
    folder = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if not module.name.startswith("test_"):
            yield importlib.import_module(f"{folder}.{module.name}")


def rows() -> dict[str, Row]:
    """The rows of all tables by key."""
    return {row.key: row for table in tables() for row in getattr(table, "ROWS", ())}
