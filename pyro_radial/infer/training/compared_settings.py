# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a checkpoint compares besides shapes: settings, rows, and the distributions of prior and likelihood."""

import hashlib
import math
from collections.abc import Collection, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from pyro_radial._pyro.checks import has_state
from pyro_radial._pyro.compat import tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Batch, Model
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.data import Rows
from pyro_radial.infer.training.checkpoint import to_plain
from pyro_radial.nn.bayesian_module import modules_of
from pyro_radial.nn.likelihoods import Likelihood
from pyro_radial.nn.modules import device_of, evaluating

# Attributes that a run sets or counts, and learning rates, which may change between resumes.
CHANGING = (
    "training",
    "num_data",
    "step",
    "max_plate_nesting",
    "optimizer",
    "optim_objs",
    "base_lrs",
)
LIBRARIES = ("gpytorch", "pyro", "pyro_radial", "torch")
MAX_DEPTH = 5
# What a transformed distribution and a mixture consist of.
PARTS = ("base_dist", "transforms", "mixture_distribution", "component_distribution")

Settings = dict[str, Any]


def describe_setting(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Describe a setting by plain values: numbers, texts, names of classes and functions, and hashes of tensors.

    The parts of an object are under their names, and its class is under "". Code is not part of a description.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, Tensor | np.ndarray):
        return _describe_tensor(torch.as_tensor(value))
    if isinstance(value, type | FunctionType | MethodType | BuiltinFunctionType):
        return value.__qualname__.rpartition("<locals>.")[2]
    settings: Settings = {"": type(value).__qualname__}
    if depth:
        settings |= {
            name: describe_setting(part, depth - 1) for name, part in _parts_by_name(value).items()
        }
    return settings


def run_settings(
    model: Model, guide: nn.Module, loss: ELBO, scheduler: object, batch: tuple[Batch, Batch]
) -> Settings:
    """Describe the prior, the likelihood, the guide, the loss and the scheduler; a batch runs the model and guide."""
    # A family's settings do not show in its parameters.
    families: Settings = {}
    for part in modules_of(AutoPerSite, guide):
        for name, family in part.chosen_families().items():
            families[name] = describe_setting(family)
    # Nothing that a loss holds is trained, such as the kernel of a prior on functions.
    held = {}
    for name, part in vars(loss).items():
        if isinstance(part, nn.Module):
            held[name] = part.state_dict()
    return {
        "guide": type(guide).__name__,
        **likelihood_settings(model),
        "loss": type(loss).__name__,
        "prior": _describe_priors(model, guide, batch),
        "loss settings": {**describe_setting(loss), "state": describe_setting(held)},
        "scheduler": describe_setting(scheduler),
        "families": families,
    }


def likelihood_settings(model: object) -> Settings:
    """Describe the likelihoods in a model, by the names of their modules."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {name: describe_setting(part) for name, part in modules if isinstance(part, Likelihood)}


def optimizer_settings(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], of_modules: Collection[str]
) -> Settings:
    """Describe an optimizer and its groups of parameters, without their learning rates.

    Parameters are known by name if they are in ``of_modules``, where names are the same in every process.
    """
    names = {}
    for number, (name, parameter) in enumerate(parameters.items()):
        names[id(parameter)] = name if name in of_modules else str(number)
    defaults = dict(to_plain(optimizer.defaults))
    defaults.pop("lr", None)
    groups = []
    for group in optimizer.param_groups:
        members = ", ".join(names.get(id(parameter), "another") for parameter in group["params"])
        settings: Settings = {"parameters": members}
        for name, value in group.items():
            if name in defaults:
                settings[name] = value
        groups.append(settings)
    return {
        "optimizer": f"{type(optimizer).__name__}({defaults})",
        "optimizer groups": describe_setting(groups),
    }


def data_settings(rows: Rows) -> Settings:
    """Describe data by their number of rows, and by hashes of tensors in memory.

    A ``Dataset`` other than ``TensorDataset`` is known by its class and its length, and by an attribute or method
    ``fingerprint`` if it has one.
    """
    dataset = rows.dataset
    known: Settings = {
        "length": len(rows),
        "class": "tensors" if dataset is None else type(dataset).__qualname__,
    }
    if dataset is None:
        x, y = tree_map(Tensor.detach, rows.tensors)
        return known | {"x": describe_setting(x), "y": describe_setting(y)}
    if isinstance(dataset, TensorDataset):
        *inputs, y = [tensor.detach() for tensor in dataset.tensors]
        return known | {
            "x": describe_setting(inputs[0] if len(inputs) == 1 else inputs),
            "y": describe_setting(y),
        }
    own = getattr(dataset, "fingerprint", None)
    return known if own is None else known | {"fingerprint": str(own() if callable(own) else own)}


def _describe_priors(model: Model, guide: nn.Module, batch: tuple[Batch, Batch]) -> Settings:
    """Describe the prior of each latent site; parameters that depend on trained ones are only named."""
    with (
        one_at_a_time(),
        evaluating(model, guide),
        seeded(0, device_of(guide, model)),
        poutine.block(),
        torch.enable_grad(),
    ):
        drawn = poutine.trace(guide).get_trace(*batch)
        trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*batch)
    priors: Settings = {}
    for name in trace.stochastic_nodes:
        prior = trace.nodes[name]["fn"]
        if isinstance(prior, Distribution):
            priors[name] = describe_setting(leaf(prior))
    return priors


def _parts_by_name(value: object) -> Settings:
    """Return the parts of an object by name."""
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, tuple | list):
        return {str(number): part for number, part in enumerate(value)}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, **value.keywords}
    if isinstance(value, Distribution):
        # An argument can have several forms, and any of them may have been computed by now.
        names = dict.fromkeys([*value.arg_constraints, *PARTS])
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    # The state of a user's object may be in any attribute, and it changes.
    if isinstance(value, nn.Module):
        changes = type(value).get_extra_state is not nn.Module.get_extra_state
    else:
        changes = has_state(value) and type(value).__module__.partition(".")[0] not in LIBRARIES
    attributes = {} if changes else getattr(value, "__dict__", {})
    kept: Settings = {}
    for name, part in attributes.items():
        if not name.startswith("_") and name not in CHANGING:
            kept[name] = part
    return kept


def _describe_tensor(tensor: Tensor) -> str:
    """Return the dtype, the shape, and the one value of all elements or a hash; a trained tensor has no values."""
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta or tensor.requires_grad:
        return f"{kind}, trained"
    dense = tensor.cpu() if tensor.layout is torch.strided else tensor.cpu().to_dense()
    elements = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if len(elements) and bool((elements == elements[0]).all()):
        return f"{kind} of {elements[0].item()}"
    return f"{kind} sha256 {hashlib.sha256(elements.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}"
