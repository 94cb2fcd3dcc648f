# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The values that an argument must refuse, made from its annotation, its documented range and a valid value."""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

Values = dict[str, Any]  # Faulty values by the name of the fault.


class Stranger:
    """A value of a type that no argument takes."""

    def __repr__(self) -> str:
        return "<stranger>"


STRANGER = Stranger()
#: What is tried at every argument, and the kinds of arguments that take it.
FOREIGN: dict[str, tuple[Any, set[str]]] = {
    "None": (None, {"None"}),
    "text": ("no such name", {"str", "Path"}),
    "number": (3, {"int", "float"}),
    "flag": (True, {"bool"}),
    "fraction": (1.5, {"float"}),
    "list": ([1.0], {"Sequence"}),
    "tensor": (torch.ones(1), {"Tensor", "inputs", "Sequence", "float"}),
    "stranger": (STRANGER, set()),
}
#: The kinds of arguments whose annotation leaves them open.
ANY = {
    "data": {"rows"},
    "test": {"rows"},
    "validation": {"rows"},
    "x": {"inputs"},
    "ood": {"inputs"},
    "y": {"Tensor"},
    "loc": {"Tensor", "float"},
    "scale": {"Tensor", "float"},
    "concentration": {"Tensor", "float"},
    "low": {"Sequence", "float"},
    "high": {"Sequence", "float"},
    "levels": {"Sequence"},
}
ALIASES = {
    "Pair": "rows",
    "PathLike": "Path",
    "Collection": "Sequence",
    "Iterable": "Sequence",
    "tuple": "Sequence",
    "list": "Sequence",
    "Size": "Sequence",
}
#: Strings that may be anything; every other string is one of a few.
FREE_TEXT = {"name", "of", "exclude"}
#: Numbers that may be zero or have any sign, and numbers with a bound, where the docstring does not say so.
FROM_ZERO = {"kl_weight", "weight_space_kl", "noise", "observation_noise", "tolerance", "num_steps", "head"}
FROM_ZERO |= {"initial_pulls", "mean_only_epochs", "event_dim", "i", "index", "seed", "margin"}
REAL = {"mean", "low", "high", "threshold", "factor"}
BELOW_ONE = {"beta1", "beta2", "validation_fraction"}
BETWEEN = {"level", "init_mean_cosine", "pi"}
#: Weights that True and False switch on and off.
SWITCHES = {"kl_weight", "weight_space_kl"}
#: Tensors that have a row for each row of another argument.
ROW_BY_ROW = {"labels", "targets", "y", "upper", "uncertainty", "observed"}


def kinds_of(argument: str, annotation: Any) -> set[str]:
    """Return the types that an annotation allows, by their last names."""
    text = inspect.formatannotation(annotation).strip("'")
    union = re.fullmatch(r"(?:typing\.)?Union\[(.*)\]", text)
    members, depth = [""], 0
    for letter in union[1] if union else text:
        depth += (letter in "[(") - (letter in "])")
        if depth == 0 and letter in "|,":
            members.append("")
        else:
            members[-1] += letter
    names = {member.strip().split("[")[0].rpartition(".")[2] for member in members}
    kinds = {ALIASES.get(name, name) for name in names}
    if "str" in kinds and argument not in FREE_TEXT and "Path" not in kinds:
        kinds = (kinds - {"str"}) | {"Literal"}
    if "Any" in kinds:
        kinds = (kinds - {"Any"}) | ANY.get(argument, set())
    return kinds


def numbers(argument: str, text: str) -> Values:
    """Return real numbers out of range."""
    found: Values = {"nan": math.nan, "inf": math.inf}
    if argument in REAL:
        return found
    found["negative"] = -1.0
    if argument in BETWEEN | BELOW_ONE or re.search("between (0|zero) and (1|one)", text):
        found["one"] = 1.0
    if argument not in FROM_ZERO | BELOW_ONE and not re.search("not negative|at least 0|zero for none", text):
        found["zero"] = 0.0
    return found


def whole_numbers(argument: str, text: str) -> Values:
    """Return whole numbers out of range."""
    stated = re.search(r"at least (\d+)", text)
    least = 0 if argument in FROM_ZERO else 1
    least = int(stated[1]) if stated else least
    found: Values = {"negative": -1, "below the least": least - 1}
    if argument == "seed":
        found["too long"] = 2**70
    return found


def tensors(argument: str, valid: torch.Tensor) -> Values:
    """Return what looks like a valid tensor, and is not."""
    found: Values = {"nested lists": valid.tolist(), "array": valid.numpy()}
    if valid.is_floating_point():
        found["all nan"] = valid * math.nan
        if argument not in ROW_BY_ROW:
            found["whole numbers"] = valid.long()
    else:
        found["real numbers"] = valid.double()
    if valid.dim() > 0:
        found |= {"no rows": valid[:0], "a dimension too few": valid[..., 0]}
    if argument in ROW_BY_ROW:
        found["a row too few"] = valid[:-1]
    if argument == "labels":
        found |= {"below zero": valid - 10, "too large": valid + 10, "flags": valid.bool()}
        found["one-hot"] = torch.eye(10, dtype=torch.long)[valid]
    if argument == "probs":
        found |= {"sum of two": 2 * valid, "negative": valid - 0.5}
    return found


def pairs(valid: tuple[torch.Tensor, torch.Tensor]) -> Values:
    """Return what looks like inputs and targets, and is not."""
    x, y = valid
    found = {
        "inputs alone": (x,),
        "no pair": x,
        "no targets": (x, None),
        "a row too few": (x, y[:-1]),
        "no rows": (x[:0], y[:0]),
        "nan": (x * math.nan, y),
    }
    return found | ({"nan targets": (x, y * math.nan)} if y.is_floating_point() else {})


def sequences(argument: str, valid: Any) -> Values:
    """Return sequences of nothing, and of what no sequence holds."""
    if argument.endswith("shape") or isinstance(valid, torch.Size):
        return {"negative size": (-1,), "fraction of a size": (1.5,)}
    kind = type(valid)
    return {"empty": kind(), "of strangers": kind([STRANGER]), "of nothing": kind([None])}


def faults(argument: str, annotation: Any, valid: Any, text: str = "", *, optional: bool = False) -> Values:
    """Return the values that an argument must refuse, by the name of the fault.

    :param argument: its name.
    :param annotation: its annotation.
    :param valid: a valid value.
    :param text: what its docstring says of it.
    :param optional: whether it may be None, although its annotation does not say so.
    """
    kinds = kinds_of(argument, annotation)
    if optional:
        kinds.add("None")
    found = {label: value for label, (value, taken_by) in FOREIGN.items() if not kinds & taken_by}
    if argument in SWITCHES:
        del found["flag"]
    if "bool" in kinds:
        found["zero"] = 0
    if "int" in kinds:
        found |= whole_numbers(argument, text)
    if "float" in kinds:
        found |= numbers(argument, text)
    if isinstance(valid, torch.Tensor):
        found |= tensors(argument, valid)
        if "inputs" in kinds:
            del found["nested lists"], found["array"]
    elif "rows" in kinds and valid is not None:
        found |= pairs(valid)
    elif "Mapping" in kinds and isinstance(valid, Mapping):
        found["stranger by name"] = {next(iter(valid), "name"): STRANGER}
    elif "Sequence" in kinds and isinstance(valid, list | tuple):
        found |= sequences(argument, valid)
    elif type(valid).__module__.startswith(("pyro_radial", "torch.nn", "pyro.distributions")):
        found["class"] = type(valid)
    return found
