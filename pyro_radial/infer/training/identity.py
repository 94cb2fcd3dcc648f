# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What identifies a run, in plain values: a checkpoint stores them, and a resume compares them by name."""

import functools
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from pyro_radial._pyro.checks import has_state
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.training.checkpoint import plain
from pyro_radial.infer.training.data import Rows
from pyro_radial.nn.bayesian_module import BayesianModule, submodules
from pyro_radial.nn.likelihoods import Likelihood

__all__ = ["data_identity", "described", "optimizer_identity", "run_identity"]

# Attributes that a run sets or counts.
CHANGING = ("training", "num_data", "step", "max_plate_nesting", "optimizer")
LIBRARIES = ("gpytorch", "numpy", "pyro", "pyro_radial", "torch")
MAX_DEPTH = 12
# Tensors with at most so many elements are shown, not hashed.
SHOWN = 4
OF_WRAPPERS = ("base_dist", "transforms", "reinterpreted_batch_ndims", "mixture_distribution", "component_distribution")

Settings = dict[str, Any]


def described(value: Any) -> Settings:
    """Describe a setting by names of classes and functions, numbers, and hashes of tensors.

    A module is described by its layers and settings, not by values that training changes. A function is described by
    its name, the values that it closes over, and the numbers in its code.
    """
    settings: Settings = {}
    _describe(settings, "", value, frozen=False, above=())
    return settings


def run_identity(model: Any, guide: nn.Module, loss: ELBO, scheduler: Any) -> Settings:
    """Describe a model, with its priors and its likelihood, a guide, a loss and a scheduler, down to their settings."""
    guides = [part for part in submodules(guide) if isinstance(part, AutoPerSite)]
    # A family's settings do not show in its parameters.
    families = {name: described(family) for part in guides for name, family in part.chosen_families().items()}
    return {
        "guide": type(guide).__name__,
        "likelihood": type(getattr(model, "likelihood", None)).__name__,
        "loss": type(loss).__name__,
        "model": described(model),
        "loss settings": described(loss),
        # Learning rates may change between resumes.
        "scheduler": {name: part for name, part in described(scheduler).items() if not name.startswith("base_lrs")},
        "families": families,
    }


def optimizer_identity(optimizer: Optimizer, parameters: Mapping[str, Tensor], of_modules: Collection[str]) -> Settings:
    """Describe an optimizer and its groups of parameters, without their learning rates.

    Parameters are known by name if they are in ``of_modules``, where names are the same in every process.
    """
    names = {id(p): name if name in of_modules else str(number) for number, (name, p) in enumerate(parameters.items())}
    defaults = {name: value for name, value in plain(optimizer.defaults).items() if name != "lr"}
    groups = [
        {
            "parameters": ", ".join(names.get(id(parameter), "another") for parameter in group["params"]),
            **{name: value for name, value in group.items() if name in defaults},
        }
        for group in optimizer.param_groups
    ]
    return {"optimizer": f"{type(optimizer).__name__}({defaults})", "optimizer groups": described(groups)}


def data_identity(rows: Rows) -> Settings:
    """Describe data: the number of rows, and hashes of tensors in memory.

    A ``Dataset`` other than ``TensorDataset`` is known by its class and its length, and by an attribute or method
    ``fingerprint`` if it has one.
    """
    dataset = rows.dataset
    known: Settings = {"length": len(rows), "class": "tensors" if dataset is None else type(dataset).__qualname__}
    if dataset is None or isinstance(dataset, TensorDataset):
        x, y = rows.tensors if dataset is None else (dataset.tensors[:-1], dataset.tensors[-1])
        return known | {name: _tensor(tensor, hashed=True) for name, tensor in (*_leaves("x", x), *_leaves("y", y))}
    own = getattr(dataset, "fingerprint", None)
    return known if own is None else known | {"fingerprint": str(own() if callable(own) else own)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{name}.{key}", value[key])
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _leaves(name if len(value) == 1 else f"{name}.{number}", part)
    else:
        yield name, value


def _describe(settings: Settings, path: str, value: Any, frozen: bool, above: tuple[int, ...]) -> None:
    """Add a value and its parts under dotted names; a cycle or a great depth ends with an ellipsis."""
    if id(value) in above or len(above) == MAX_DEPTH:
        settings[path] = "..."
        return
    # Nothing that a loss holds is trained, such as the kernel of a prior on functions.
    frozen = frozen or isinstance(value, ELBO)
    settings[path], parts = _described_once(value, frozen)
    for name, part in parts.items():
        _describe(settings, f"{path}.{name}" if path else name, part, frozen, (*above, id(value)))


def _described_once(value: Any, frozen: bool) -> tuple[Any, Mapping[str, Any]]:
    """A plain value for a thing itself, and its parts by name."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        return (repr(value) if isinstance(value, float) and not math.isfinite(value) else value), {}
    if isinstance(value, Tensor | np.ndarray):
        return _tensor(torch.as_tensor(value), frozen), {}
    if isinstance(value, Mapping):
        return "mapping", {str(name): part for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value).__name__, {str(number): part for number, part in enumerate(value)}
    if isinstance(value, functools.partial):
        return "partial", {"func": value.func, "args": value.args, **value.keywords}
    if isinstance(value, MethodType):
        return value.__qualname__, {"function": value.__func__, "self": value.__self__}
    if isinstance(value, FunctionType):
        return value.__qualname__.rpartition("<locals>.")[2], _closed_over(value)
    if isinstance(value, type | BuiltinFunctionType):
        return value.__qualname__, {}
    if isinstance(value, nn.Module):
        return _module(value, frozen)
    if isinstance(value, Distribution):
        # An argument can have several forms, and any of them may have been computed by now.
        names = dict.fromkeys([*getattr(value, "arg_constraints", {}), *OF_WRAPPERS])
        return type(value).__qualname__, {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, PyroOptim):
        return type(value).__qualname__, {"optimizer": value.pt_optim_constructor, "settings": value.pt_optim_args}
    # An object of a user's class that has a state may keep the state in any attribute.
    ours = type(value).__module__.partition(".")[0] in LIBRARIES or not has_state(value)
    return type(value).__qualname__, _attributes(value) if ours else {}


def _tensor(tensor: Tensor, frozen: bool = False, *, hashed: bool = False) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or (tensor.requires_grad and not frozen and not hashed):
        return f"{kind}, trained"
    if tensor.numel() <= SHOWN and not hashed:
        return f"{tensor.dtype} {tensor.tolist()}"
    dense = tensor.detach().cpu().to_dense() if tensor.layout != torch.strided else tensor.detach().cpu()
    content = dense.contiguous().reshape(-1).resolve_conj().resolve_neg().view(torch.uint8).numpy()
    return f"{kind} sha256 {hashlib.sha256(content.tobytes()).hexdigest()[:16]}"


def _module(module: nn.Module, frozen: bool) -> tuple[str, Mapping[str, Any]]:
    """A module by its class, its settings and its submodules; a frozen one by its parameters too."""
    settings = _attributes(module)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        settings = {}  # They are part of the state, and may change.
    elif not frozen and not isinstance(module, Likelihood):
        # A tensor that is neither parameter nor buffer is usually kept from the latest call.
        settings = {n: own for n, own in settings.items() if not isinstance(own, Tensor) and not _collects(own)}
    parts = settings | dict(module.named_children())
    if isinstance(module, BayesianModule):
        parts |= {"net": module.skeleton, "prior": module.prior}
    if frozen:
        parts |= {f"state.{name}": tensor for name, tensor in module.state_dict().items()}
    return f"{type(module).__qualname__}({module.extra_repr()})", parts


def _closed_over(function: FunctionType) -> Settings:
    """The values that a function closes over, its defaults, and its numbers."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells} | (function.__kwdefaults__ or {})
    values |= {f"default_{number}": part for number, part in enumerate(function.__defaults__ or ())}
    if function.__module__.partition(".")[0] not in LIBRARIES:
        values["numbers"] = tuple(_numbers(function.__code__.co_consts))
    return {name: part for name, part in values.items() if not _collects(part)}


def _numbers(constants: Iterable[Any]) -> Iterator[float]:
    """The numbers among the constants of a function, and of those within; booleans and texts are left out."""
    for own in constants:
        if isinstance(own, CodeType | tuple):
            yield from _numbers(own if isinstance(own, tuple) else own.co_consts)
        elif isinstance(own, int | float) and not isinstance(own, bool):
            yield own


def _attributes(value: Any) -> Settings:
    """The public attributes of an object."""
    attributes = getattr(value, "__dict__", {})
    return {name: part for name, part in attributes.items() if not name.startswith("_") and name not in CHANGING}


def _collects(value: Any) -> bool:
    """Whether a thing may collect what a run produces, so that it says nothing about settings."""
    return isinstance(value, list | dict | set | Optimizer)
