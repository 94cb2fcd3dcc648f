# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a run is of, in plain values that are stored with it and compared by name."""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_radial._pyro.state import has_state
from pyro_radial.functional.priors import FunctionPrior
from pyro_radial.infer.autoguide.families import Family
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihoods import Likelihood

__all__ = ["described", "digest_of"]

# Their classes and functions are known by name; of others the code counts as well.
LIBRARIES = ("builtins", "gpytorch", "numpy", "pyro", "pyro_radial", "torch")
# What the run itself sets, or counts.
CHANGING = ("training", "num_data", "step", "max_plate_nesting", "optimizer")
DEPTH = 12
# Tensors of no more elements are shown, not hashed.
SHOWN = 4
OF_WRAPPERS = ("base_dist", "transforms", "reinterpreted_batch_ndims", "mixture_distribution", "component_distribution")

Flat = dict[str, Any]


def described(value: Any) -> Flat:
    """A setting by what it is: names of classes, numbers, digests of tensors and of the code of functions.

    Trained values count nowhere: of a module its layers and their settings, of a function what it has in its closure.

    :param value: anything.
    :returns: plain values by dotted names, "" for the setting itself.
    """
    flat: Flat = {}
    _Description(flat).add("", value, DEPTH)
    return flat


def digest_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, for a hash."""
    dense = tensor.detach().cpu().to_dense() if tensor.layout != torch.strided else tensor.detach().cpu()
    return dense.contiguous().reshape(-1).resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes()


class _Description:
    """One description in the making."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._open: set[int] = set()

    def add(self, path: str, value: Any, depth: int) -> None:
        """Describe a value under a dotted name; cycles and great depths end with the name of a class."""
        kind, parts = ("...", {}) if depth == 0 or id(value) in self._open else _described_once(value)
        self._flat[path] = kind
        self._open.add(id(value))
        for name, part in parts.items():
            self.add(f"{path}.{name}" if path else name, part, depth - 1)
        self._open.discard(id(value))


def _described_once(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """A plain value for a thing itself, and its parts by name."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value), {}
    if value is None or isinstance(value, bool | int | float | str):
        return value, {}
    if isinstance(value, Tensor | np.ndarray):
        return _tensor(torch.as_tensor(value)), {}
    if isinstance(value, Mapping):
        return "mapping", {str(name): part for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value).__name__, {str(number): part for number, part in enumerate(value)}
    if isinstance(value, functools.partial):
        return "partial", {"func": value.func, "args": value.args, **value.keywords}
    if isinstance(value, MethodType):
        return value.__qualname__, {"function": value.__func__, "self": value.__self__}
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, type | BuiltinFunctionType):
        return value.__qualname__, {}
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, Distribution):
        return type(value).__qualname__, {name: getattr(value, name) for name in _arguments(value)}
    if isinstance(value, PyroOptim):
        return type(value).__qualname__, {"optimizer": value.pt_optim_constructor, "settings": value.pt_optim_args}
    return _object(value)


def _tensor(tensor: Tensor) -> str:
    shape = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.requires_grad or tensor.is_meta:
        return f"{shape}, trained"
    if tensor.numel() <= SHOWN:
        return f"{tensor.dtype} {tensor.tolist()}"
    return f"{shape} {hashlib.sha256(digest_of(tensor)).hexdigest()[:16]}"


def _arguments(distribution: Distribution) -> list[str]:
    """What defines a distribution; of several forms of one argument all, since any may have been computed by now."""
    names = [*getattr(distribution, "arg_constraints", {}), *OF_WRAPPERS]
    return [name for name in dict.fromkeys(names) if hasattr(distribution, name)]


def _object(value: Any) -> tuple[Any, Mapping[str, Any]]:
    kind = type(value)
    code = _code_of(kind.__call__) if callable(value) else ""
    # Of classes of others nothing is known of what their attributes are for, unless they are there to be called.
    # What keeps a state may have its attributes there.
    ours = (
        _is_of_library(kind)
        or isinstance(value, Family)
        or (not has_state(value) and (callable(value) or hasattr(value, "sample_parameter")))
    )
    return kind.__qualname__ + code, _settings(value) if ours else {}


def _settings(value: Any) -> dict[str, Any]:
    """The public attributes of an object."""
    attributes = getattr(value, "__dict__", {})
    return {name: part for name, part in attributes.items() if not name.startswith("_") and name not in CHANGING}


def _module(module: nn.Module) -> tuple[str, Mapping[str, Any]]:
    """A module by its class, its settings and its submodules; of a prior on functions, its parameters too."""
    kind = type(module)
    name = f"{kind.__qualname__}({module.extra_repr()}){_code_of(kind.forward)}"
    if kind.get_extra_state is not nn.Module.get_extra_state:
        settings: dict[str, Any] = {}  # They are part of its state, and may change.
    elif isinstance(module, Likelihood | FunctionPrior):
        settings = _settings(module)
    else:
        # A tensor that is neither parameter nor buffer is as a rule kept from the latest call.
        attributes = _settings(module).items()
        settings = {
            name: part for name, part in attributes if not _is_changeable(part) and not isinstance(part, Tensor)
        }
    parts = settings | dict(module.named_children())
    if isinstance(module, BayesianModule):
        parts |= {"net": module.skeleton, "prior": module.prior}
    if isinstance(module, FunctionPrior):
        parts |= {f"state.{name}": tensor for name, tensor in module.state_dict().items()}
    return name, parts


def _function(function: FunctionType) -> tuple[str, Mapping[str, Any]]:
    """A function by its name and code, and what it refers to."""
    name = function.__qualname__.rpartition("<locals>.")[2]
    code = _code_of(function)
    if not code:
        return name, {}
    referred = inspect.getclosurevars(function)
    parts = {**referred.globals, **referred.nonlocals, **(function.__kwdefaults__ or {})}
    parts |= {f"default_{number}": part for number, part in enumerate(function.__defaults__ or ())}
    return name + code, {
        name: part for name, part in parts.items() if not isinstance(part, ModuleType) and not _is_changeable(part)
    }


def _is_changeable(value: Any) -> bool:
    """Whether a thing may well collect what a run produces, so that it says nothing of its settings."""
    return isinstance(value, list | dict | set | torch.optim.Optimizer)


def _is_of_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in LIBRARIES


def _code_of(function: Callable[..., Any] | None) -> str:
    """A digest of a function's code in words, nothing for those of libraries."""
    code = getattr(function, "__code__", None)
    if code is None or _is_of_library(function):
        return ""
    digest = hashlib.sha256()
    _add_code(digest, code)
    return f" code {digest.hexdigest()[:16]}"


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:
            # The order in a set differs from process to process.
            digest.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())
