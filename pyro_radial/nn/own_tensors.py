# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Copies of the parameters and buffers of a network that are not random."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial._pyro.compat import stored_name

__all__ = ["OwnTensors", "own_copy"]


class OwnTensors:
    """
    Copies of what is not random, in modules nested as in the network.

    Reading a trained parameter while Pyro runs a model makes its ``param`` statement. This is no module itself, so
    that names in the network can never meet names of ours; the owner registers :attr:`root`.

    :ivar PyroModule root: holds trained parameters as parameters, frozen ones and buffers as buffers.
    :param nn.Module net: the network.
    :param random: the names of the parameters to leave out.
    """

    def __init__(self, net: nn.Module, random: Collection[str]) -> None:
        self.root = PyroModule()
        self._trained: dict[str, tuple[PyroModule, str]] = {}
        self._fixed: dict[str, tuple[PyroModule, str]] = {}
        for name, parameter in net.named_parameters():
            if name in random:
                continue
            owner, leaf = self._place(name)
            if parameter.requires_grad:
                setattr(owner, leaf, nn.Parameter(own_copy(parameter)))
                self._trained[name] = owner, leaf
            else:
                owner.register_buffer(leaf, own_copy(parameter))
                self._fixed[name] = owner, leaf
        saved = net.state_dict(keep_vars=True).keys()
        for name, buffer in net.named_buffers():
            owner, leaf = self._place(name)
            owner.register_buffer(leaf, own_copy(buffer), persistent=name in saved)
            self._fixed[name] = owner, leaf

    def trained(self) -> dict[str, Tensor]:
        """The trained parameters by name, announced to Pyro."""
        local = pyro.settings.get("module_local_params")
        for owner, leaf in () if local else self._trained.values():
            _adopt_stored_value(owner, leaf)
        return {name: getattr(owner, leaf) for name, (owner, leaf) in self._trained.items()}

    def fixed(self) -> dict[str, Tensor]:
        """The frozen parameters and the buffers by name."""
        return {name: getattr(owner, leaf) for name, (owner, leaf) in self._fixed.items()}

    def keep_new_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes from ``tensors`` the buffers that a module assigned, instead of writing into them."""
        for name, (owner, leaf) in self._fixed.items():
            if tensors[name] is not getattr(owner, leaf):
                setattr(owner, leaf, tensors[name].detach())

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Puts back what a call wrote into buffers, if it raises."""
        before = {name: tensor.clone() for name, tensor in self.fixed().items()}
        try:
            yield
        except Exception:
            with torch.no_grad():
                for name, tensor in self.fixed().items():
                    tensor.copy_(before[name])
            raise

    def _place(self, name: str) -> tuple[PyroModule, str]:
        *path, leaf = name.split(".")
        owner: PyroModule = self.root
        for part in path:
            children = dict(owner.named_children())
            if part not in children:
                owner.add_module(part, PyroModule())
            owner = getattr(owner, part)
        return owner, leaf


def _adopt_stored_value(owner: PyroModule, leaf: str) -> None:
    # Pyro trains what its store holds under our name, which after a load of the store is not our tensor.
    store = pyro.get_param_store()
    fullname = stored_name(owner, leaf)
    own = dict(owner.named_parameters(recurse=False))[leaf]
    if fullname in store and store[fullname] is not own:
        with torch.no_grad():
            own.copy_(store[fullname])
        store[fullname] = own


def own_copy(tensor: Tensor) -> Tensor:
    """A detached copy."""
    # Contiguous, since Pyro's store keeps a copy of any other tensor and would train that one.
    return tensor.detach().clone(memory_format=torch.contiguous_format)
