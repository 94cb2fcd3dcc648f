# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions by site name in the state of a module: tensors are buffers, structures are extra state."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial.distributions.storage import describe, rebuild

__all__ = ["StoredDistribution", "StoredDistributions"]

# Under which torch keeps the extra state of a module.
EXTRA_STATE = "_extra_state"


class StoredDistribution(nn.Module):
    """One distribution: its tensors are buffers, its structure is the module's extra state.

    :param structure: a structure from ``describe``, or None until it is loaded.
    :param Mapping tensors: the tensors that it names.
    """

    def __init__(self, structure: Any, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._structure = structure
        self._distribution: Any = None

    @classmethod
    def of(cls, distribution: Any) -> "StoredDistribution":
        """Copy a distribution; a ValueError if it cannot be stored."""
        return cls(*describe(distribution))

    @property
    def distribution(self) -> Any:
        """The distribution that uses these buffers."""
        if self._distribution is None:
            self._distribution = rebuild(self._structure, dict(self.named_buffers()))
        return self._distribution

    def get_extra_state(self) -> Any:
        """Return the structure, in dicts, lists, strings and numbers."""
        return self._structure

    def set_extra_state(self, state: Any) -> None:
        """Set the structure; its tensors are the buffers."""
        self._structure, self._distribution = state, None

    def __getstate__(self) -> dict[str, Any]:
        # Transforms of a distribution in use keep values of a graph, which cannot be copied.
        return {**self.__dict__, "_distribution": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredDistribution":
        self._distribution = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._distribution = None
        super()._load_from_state_dict(*args, **kwargs)


class StoredDistributions(nn.Module):
    """Distributions by site name. Loading a state adds and removes sites to match the state."""

    _place: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Follows .to(), so that loaded sites are created on the right device.
        self.register_buffer("_place", torch.empty(0), persistent=False)

    def __getitem__(self, name: str) -> Any:
        stored = self._modules[_key(name)]
        assert isinstance(stored, StoredDistribution)
        try:
            return stored.distribution
        except ValueError as error:
            raise ValueError(f"the stored distribution of site '{name}': {error}") from error

    def __iter__(self) -> Iterator[str]:
        return (_name(key) for key in self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def update(self, distributions: Mapping[str, StoredDistribution]) -> None:
        """Set the distributions of these sites."""
        for name, distribution in distributions.items():
            self._modules[_key(name)] = distribution

    def as_dict(self) -> dict[str, Any]:
        """Return ``{site: distribution}``."""
        return {name: self[name] for name in self}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            if key.startswith(f"{prefix}["):
                site, _, buffer = key[len(prefix) :].rpartition(".")
                if buffer != EXTRA_STATE:
                    saved.setdefault(site, {})[buffer] = tensor
        for site in [site for site in self._modules if site not in saved]:
            del self._modules[site]
        for site, tensors in saved.items():
            if not _fits(self._modules.get(site), tensors):
                empty = {name: torch.empty_like(t, device=self._place.device) for name, t in tensors.items()}
                self._modules[site] = StoredDistribution(None, empty)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _fits(module: nn.Module | None, tensors: Mapping[str, Tensor]) -> bool:
    if module is None:
        return False
    return {n: b.shape for n, b in module.named_buffers()} == {n: t.shape for n, t in tensors.items()}


def _key(name: str) -> str:
    """A name for a submodule: without dots, and unlike any attribute."""
    return "[" + name.replace("%", "%25").replace("/", "%2F").replace(".", "/") + "]"


def _name(key: str) -> str:
    return key[1:-1].replace("/", ".").replace("%2F", "/").replace("%25", "%")
