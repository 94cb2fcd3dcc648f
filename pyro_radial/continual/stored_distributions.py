# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions by site name as buffers of a module: they follow ``.to()`` and are saved as tensors alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial.distributions.storage import describe, rebuild

DESCRIPTION = "description"


class StoredDistribution(nn.Module):
    """One distribution: its tensors, and what to make of them as the bytes of a JSON text."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self._distribution: Any = None

    @classmethod
    def of(cls, distribution: Any) -> "StoredDistribution":
        """A copy of a distribution.

        :raises ValueError: if it cannot be stored.
        """
        text, tensors = describe(distribution)
        return cls({**tensors, DESCRIPTION: torch.tensor(list(text.encode()), dtype=torch.uint8)})

    @property
    def distribution(self) -> Any:
        """The distribution, on these very buffers."""
        if self._distribution is None:
            tensors = dict(self.named_buffers())
            text = bytes(tensors.pop(DESCRIPTION).tolist()).decode()
            self._distribution = rebuild(text, tensors)
        return self._distribution

    def __getstate__(self) -> dict[str, Any]:
        # For a copy or a file: a distribution in use remembers, in its transforms, values that belong to a graph.
        return {**self.__dict__, "_distribution": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StoredDistribution":
        self._distribution = None
        super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._distribution = None
        super()._load_from_state_dict(*args, **kwargs)


class StoredDistributions(nn.Module):
    """Distributions by site name. Loading a state makes and removes sites as the state has them."""

    _place: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Follows .to(), so that what is loaded comes to where the rest is.
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
        """Put these distributions in the places of their sites."""
        for name, distribution in distributions.items():
            self._modules[_key(name)] = distribution

    def as_dict(self) -> dict[str, Any]:
        """``{site: distribution}``."""
        return {name: self[name] for name in self}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state_dict.items():
            if key.startswith(f"{prefix}["):
                site, _, buffer = key[len(prefix) :].rpartition(".")
                saved.setdefault(site, {})[buffer] = tensor
        for site in [site for site in self._modules if site not in saved]:
            del self._modules[site]
        for site, tensors in saved.items():
            # In a state that is not ours to judge, torch reports what is missing.
            if not _fits(self._modules.get(site), tensors):
                empty = {name: torch.empty_like(t, device=self._place.device) for name, t in tensors.items()}
                self._modules[site] = StoredDistribution(empty)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _fits(module: nn.Module | None, tensors: Mapping[str, Tensor]) -> bool:
    if module is None:
        return False
    return {n: b.shape for n, b in module.named_buffers()} == {n: t.shape for n, t in tensors.items()}


def _key(name: str) -> str:
    """A site's name without dots, which names of submodules cannot have, and unlike any attribute."""
    return "[" + name.replace("%", "%25").replace("/", "%2F").replace(".", "/") + "]"


def _name(key: str) -> str:
    return key[1:-1].replace("/", ".").replace("%2F", "/").replace("%25", "%")
