# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Store any distribution as plain tensors and a structure that says how to put them together, or in a module.

A distribution is taken apart and rebuilt along the signatures of its class and of the classes inside it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.utils import lazy_property

from pyro_radial._pyro.checks import prefix_errors
from pyro_radial.distributions.wrappers import drop_repeats

DISTRIBUTIONS = (Distribution, TorchDistributionMixin)
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "size": torch.Size}

# Arguments that torch keeps under another name, also without an underscore.
KEPT_AS = {"base_distribution": "base_dist", "transform": "_inv", "tseq": "transforms"}
# Names that a module has already, so its buffers cannot have them.
MODULE_ATTRIBUTES = frozenset(dir(nn.Module()))
_MISSING = object()
# Data that a file can hold without code: dicts, lists, strings and numbers.
PlainData = Any


def describe(distribution: object) -> tuple[PlainData, dict[str, Tensor]]:
    """Return a distribution's structure and its tensors, by names that buffers can have, for :func:`rebuild`.

    A ValueError names the class and the reason, if the distribution cannot be stored.
    """
    tensors: dict[str, Tensor] = {}
    try:
        if not isinstance(distribution, DISTRIBUTIONS):
            raise ValueError("it is not a distribution")
        structure = _write(distribution, (), tensors)
        _check_same(distribution, rebuild(structure, tensors), tensors)
    # Constructors and densities of other classes may raise anything.
    except Exception as error:
        raise ValueError(
            f"a distribution of class {type(distribution).__name__} cannot be stored: {error}"
        ) from error
    return structure, tensors


def rebuild(structure: PlainData, tensors: Mapping[str, Tensor]) -> Any:
    """Return the distribution that :func:`describe` took apart, without importing any code."""
    if not isinstance(structure, dict):
        return structure
    if "tensor" in structure:
        if structure["tensor"] not in tensors:
            raise ValueError(f"the tensor {structure['tensor']!r} of the structure is missing")
        tensor = tensors[structure["tensor"]]
        return tensor.expand(structure["shape"]) if "shape" in structure else tensor
    if "class" in structure:
        cls = _find_class(*structure["class"])
        arguments = {
            name: rebuild(argument, tensors) for name, argument in structure["arguments"].items()
        }
        if "validate_args" in _find_parameters(cls):
            arguments["validate_args"] = False
        return cls(**arguments)
    ((kind, items),) = structure.items()
    return SEQUENCES[kind](rebuild(item, tensors) for item in items)


class StoredDistribution(nn.Module):
    """One distribution, as :func:`describe` takes it apart: its tensors are buffers, its structure is extra state."""

    def __init__(self, structure: object, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._structure = structure
        self._distribution: Any = None

    @property
    def distribution(self) -> Any:
        """Return the distribution that uses these buffers."""
        if self._distribution is None:
            self._distribution = rebuild(self._structure, dict(self.named_buffers()))
        return self._distribution

    def get_extra_state(self) -> PlainData:
        """Return the structure, in dicts, lists, strings and numbers."""
        return self._structure

    def set_extra_state(self, state: object) -> None:
        """Set the structure; its tensors are the buffers."""
        self._structure = state
        self._distribution = None

    def __getstate__(self) -> dict[str, object]:
        # Transforms of a distribution in use keep values of a graph, which cannot be copied.
        return {**self.__dict__, "_distribution": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredDistribution":
        self._distribution = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self._distribution = None
        super()._load_from_state_dict(*args, **kwargs)


class StoredDistributions(nn.Module):
    """Distributions by site name. Loading a state adds and removes sites to match the state."""

    _empty_on_device: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Follows .to(), so that loaded sites are created on the right device.
        self.register_buffer("_empty_on_device", torch.empty(0), persistent=False)

    def __getitem__(self, name: str) -> Distribution:
        stored: Any = self._modules[_site_key(name)]
        with prefix_errors(f"the stored distribution of site '{name}'"):
            return stored.distribution

    def __iter__(self) -> Iterator[str]:
        return map(_site_name, self._modules)

    def update(self, distributions: Mapping[str, StoredDistribution]) -> None:
        """Set the distributions of these sites."""
        for name, distribution in distributions.items():
            self._modules[_site_key(name)] = distribution
            for tensor in distribution.buffers():
                self._empty_on_device = tensor.new_empty(0)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            if key.startswith(f"{prefix}["):
                site, _, buffer = key[len(prefix) :].rpartition(".")
                if buffer != "_extra_state":
                    saved.setdefault(site, {})[buffer] = tensor
        for site in self._modules.keys() - saved.keys():
            del self._modules[site]
        for site, tensors in saved.items():
            module = self._modules.get(site)
            if module is None or _shapes(dict(module.named_buffers())) != _shapes(tensors):
                empty = {
                    name: torch.empty_like(tensor, device=self._empty_on_device.device)
                    for name, tensor in tensors.items()
                }
                self._modules[site] = StoredDistribution(None, empty)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _site_key(name: str) -> str:
    """Return a name for a submodule: without dots, and unlike any attribute."""
    return "[" + name.replace("%", "%25").replace("/", "%2F").replace(".", "/") + "]"


def _site_name(key: str) -> str:
    return key[1:-1].replace("/", ".").replace("%2F", "/").replace("%25", "%")


def _write(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> PlainData:
    """Write a value in dicts, lists, strings and numbers, and add its tensors to ``tensors``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _write_tensor(value, path, tensors)
    for kind, sequence in SEQUENCES.items():
        if type(value) is sequence:
            *outer, name = path
            return {
                kind: [
                    _write(item, (*outer, f"{name}_{i}"), tensors) for i, item in enumerate(value)
                ]
            }
    if isinstance(value, (*DISTRIBUTIONS, Transform)):
        cls = type(value)
        arguments = {
            name: _write(argument, (*path, name), tensors) for name, argument in _arguments(value)
        }
        return {"class": [cls.__module__, cls.__qualname__], "arguments": arguments}
    raise ValueError(f"its argument {'.'.join(path)!r} is of class {type(value).__name__}")


def _write_tensor(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> PlainData:
    tensor = tensor.detach()
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"its tensor {'.'.join(path)!r} is not finite")
    once = drop_repeats(tensor)
    key = next(
        key for key in _tensor_names(path) if key not in tensors and key not in MODULE_ATTRIBUTES
    )
    tensors[key] = once.clone(memory_format=torch.contiguous_format)
    return (
        {"tensor": key}
        if once.shape == tensor.shape
        else {"tensor": key, "shape": list(tensor.shape)}
    )


def _tensor_names(path: tuple[str, ...]) -> Iterator[str]:
    """Return names for a tensor, the shortest first."""
    whole = "_".join(path)
    return chain(
        ("_".join(path[start:]) for start in reversed(range(len(path)))),
        (f"{whole}_{n}" for n in count(2)),
    )


def _arguments(value: object) -> Iterator[tuple[str, object]]:
    """Return the arguments that make this distribution or transform."""
    parameters = _find_parameters(type(value))
    given_names = _given_optional_arguments(
        value, [name for name, parameter in parameters.items() if parameter.default is None]
    )
    for name, parameter in parameters.items():
        if name == "validate_args" or (parameter.default is None and name not in given_names):
            continue
        argument = _attribute(value, name)
        if argument is not _MISSING:
            yield name, argument
        elif parameter.default is parameter.empty:
            raise ValueError(f"{type(value).__name__} has no attribute for its argument {name!r}")


def _find_parameters(cls: Any) -> dict[str, inspect.Parameter]:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _attribute(value: object, name: str) -> object:
    # The object's own first: the mask of a masked distribution is ``_mask``, and ``mask`` is a method.
    for attribute in (name, f"_{name}", KEPT_AS.get(name)):
        if attribute in vars(value):
            return vars(value)[attribute]
    return getattr(value, name, _MISSING)


def _given_optional_arguments(value: object, optional: list[str]) -> set[str]:
    """Return the optional arguments that the object was given."""
    attributes = vars(value)
    names_with_values = [
        name for name in optional if attributes.get(name, attributes.get(f"_{name}")) is not None
    ]
    # Alternatives such as probs and logits: a used object also holds what it computed from the given argument.
    kinds = {
        name: type(inspect.getattr_static(type(value), name, None))
        for name in {*attributes, *optional}
    }
    either = [
        name
        for name in attributes
        if name in names_with_values and issubclass(kinds[name], lazy_property)
    ]
    if not names_with_values:
        either = [name for name in optional if issubclass(kinds[name], property)]
    stored_alternative = sorted(either, key=lambda name: not _is_the_parameter(value, name))[:1]
    return set(names_with_values) - set(either) | set(stored_alternative)


def _is_the_parameter(value: object, name: str) -> bool:
    """Return whether this is the ``_param`` of torch's categorical distributions: the given one of probs and logits."""
    argument, parameter = getattr(value, name), getattr(value, "_param", None)
    return (
        isinstance(argument, Tensor)
        and isinstance(parameter, Tensor)
        and torch.equal(argument, parameter)
    )


def _find_class(module: str, qualname: str) -> type:
    """Return the class that a structure names, if it is imported already and allowed."""
    # ``getattr`` on a module may import, ``__dict__`` does not.
    cls: Any = sys.modules.get(module)
    for name in qualname.split("."):
        cls = getattr(cls, "__dict__", {}).get(name)
    if cls is None:
        raise ValueError(
            f"there is no class {qualname} in module {module}: import it before loading"
        )
    if not (isinstance(cls, type) and issubclass(cls, (*DISTRIBUTIONS, Transform))):
        raise ValueError(f"{qualname} of module {module} is neither a distribution nor a transform")
    return cls


@torch.no_grad()
def _check_same(distribution: Distribution, rebuilt: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error unless both distributions have the same shapes and the same density at a sample."""
    devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    with torch.random.fork_rng(devices=devices):
        # A copy, because transforms remember what they sampled and would not invert it.
        sample = distribution.sample().clone()
    shapes = (distribution.batch_shape, distribution.event_shape)
    rebuilt_shapes = (rebuilt.batch_shape, rebuilt.event_shape)
    if shapes != rebuilt_shapes:
        raise ValueError(f"rebuilt, its shapes are {rebuilt_shapes}, not {shapes}")
    log_prob = distribution.log_prob(sample)
    if bool(log_prob.isnan().any()):
        raise ValueError("its log-density at a sample is NaN")
    torch.testing.assert_close(
        rebuilt.log_prob(sample), log_prob, msg="rebuilt, its log-density at a sample differs"
    )
