# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The tensors of a network that are not random: copies that a Bayesian module owns, trains and moves."""

from collections.abc import Collection, Mapping
from typing import Any

import pyro
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial._pyro.compat import stored_name


class FixedTensors:
    """Copies of a network's parameters and buffers that are not random, in modules nested as in the network.

    Reading a trained parameter while Pyro runs a model makes its ``param`` statement. The owner registers :attr:`root`,
    so that names in the network never meet names of ours.
    """

    def __init__(self, net: nn.Module, random: Collection[str]) -> None:
        self.root = PyroModule()
        self._trained: dict[str, tuple[PyroModule, str]] = {}
        self._untrained: dict[str, tuple[PyroModule, str]] = {}
        saved = net.state_dict(keep_vars=True).keys()
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            if name in random:
                continue
            owner, leaf = place_below(self.root, name)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                setattr(owner, leaf, nn.Parameter(copy_tensor(tensor)))
                self._trained[name] = owner, leaf
            else:
                owner.register_buffer(leaf, copy_tensor(tensor), persistent=name in saved)
                self._untrained[name] = owner, leaf

    def trained(self) -> dict[str, Tensor]:
        """Return the trained parameters by name; reading them makes their ``param`` statements."""
        store = pyro.get_param_store()
        is_shared = not pyro.settings.get("module_local_params")
        for owner, leaf in self._trained.values() if is_shared else ():
            # Pyro trains what its store holds under our name, which after a load of the store is not our tensor.
            fullname = stored_name(owner, leaf)
            parameter = dict(owner.named_parameters(recurse=False))[leaf]
            if fullname in store and store[fullname] is not parameter:
                with torch.no_grad():
                    parameter.copy_(store[fullname])
                store[fullname] = parameter
        return {name: getattr(owner, leaf) for name, (owner, leaf) in self._trained.items()}

    def untrained(self) -> dict[str, Tensor]:
        """Return the frozen parameters and the buffers by name."""
        return {name: getattr(owner, leaf) for name, (owner, leaf) in self._untrained.items()}

    def keep_new_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the buffers that a module assigned instead of writing into them."""
        for name, (owner, leaf) in self._untrained.items():
            if tensors[name] is not getattr(owner, leaf):
                setattr(owner, leaf, tensors[name].detach())


def place_below(root: nn.Module, name: str) -> tuple[Any, str]:
    """Return the module below ``root`` that holds the tensor of a dotted name, and the last part of the name.

    A module that is missing on the way is made, of the root's class.
    """
    *path, leaf = name.split(".")
    owner = root
    for module_name in path:
        if module_name not in dict(owner.named_children()):
            owner.add_module(module_name, type(root)())
        owner = owner.get_submodule(module_name)
    return owner, leaf


def copy_tensor(tensor: Tensor) -> Tensor:
    """Return a detached, contiguous copy; Pyro's store copies any other tensor, and trains its own copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
