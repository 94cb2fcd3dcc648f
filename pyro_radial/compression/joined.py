# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks with skip connections: which channels can only be cut together, by the library Torch-Pruning."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial.compression.graph import LAYERS, NORMS, weight_layers
from pyro_radial.compression.scores import Cut, Scores
from pyro_radial.compression.surgery import cut_module

__all__ = ["JoinedChannels"]


class JoinedChannels:
    """A network with groups of channels that can only be cut together, each named after one of its layers.

    An addition joins the channels that it adds, and batch norms go along. A concatenation joins nothing: the layers
    after it lose the inputs of the channels that are cut. Groups that reach the network's own inputs or outputs stay.
    A ValueError for a network that Torch-Pruning reads wrongly, an ImportError without that library.
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.net, self.sizes = net, {name: [*layer.weight.shape[:2]] for name, layer in weight_layers(net).items()}
        for name, module in net.named_modules():
            if isinstance(module, (*NORMS, nn.PReLU)):
                self.sizes[name] = [vars(module).get("num_features") or vars(module)["num_parameters"]]
        try:
            self.groups = _read(copy.deepcopy(net).eval().requires_grad_(), x)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            raise ValueError(f"net must give an output for x that Torch-Pruning can trace, got {error!r}") from error
        for root in self.groups:
            self._check(root, x)

    def pool(self, scores: Scores) -> Scores:
        """Give each channel of a group the largest score of its outputs, or of its inputs, if smaller."""
        pooled, given = {}, (scores.outputs, scores.inputs)
        for root, members in self.groups.items():
            largest = torch.full((2, self.sizes[root][0]), -math.inf, dtype=torch.double)
            scored = torch.zeros_like(largest, dtype=torch.bool)
            for name, side, at, of in members:
                if name in given[side]:
                    largest[side].scatter_reduce_(0, of, given[side][name].detach().cpu().double()[at], "amax")
                    scored[side, of] = True
            if scored.all(1).any():
                pooled[root] = largest[scored.all(1)].amin(0)
        if not pooled:
            raise ValueError("net must have channels with scores that do not reach its inputs or outputs, got none")
        return Scores(pooled)

    def cut(self, cut: Cut) -> nn.Module:
        """Copy the network without the channels that a mask over its group's outputs cuts."""
        small = copy.deepcopy(self.net)
        for name, kept in self._kept(cut).items():
            small.set_submodule(name, cut_module(small.get_submodule(name), *kept))
        return small

    def _kept(self, cut: Cut) -> dict[str, list[Tensor]]:
        kept = {name: [torch.ones(size, dtype=torch.bool) for size in sizes] for name, sizes in self.sizes.items()}
        for root, mask in cut.outputs.items():
            for name, side, at, of in self.groups[root]:
                kept[name][side][at] &= mask.cpu()[of]
        return kept

    @torch.no_grad()
    def _check(self, root: str, x: Tensor) -> None:
        """Raise a ValueError unless a cut gives the outputs of the network in which later layers read zeros."""
        cut, zeroed = Cut({root: torch.arange(self.sizes[root][0]) % 2 == 0}), copy.deepcopy(self.net).eval()
        try:
            for name, (_, *inputs) in self._kept(cut).items():
                for kept in inputs:
                    zeroed.get_parameter(f"{name}.weight")[:, ~kept] = 0
            expected, got = zeroed(x), self.cut(cut).eval()(x)
            torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-3 * float(expected.abs().max()))
        except (RuntimeError, AssertionError, LookupError) as error:
            raise ValueError(f"net must not mix the channels of {root!r}, got without half of them: {error}") from error


def _read(net: nn.Module, x: Tensor) -> dict[str, list[Any]]:
    """For each group its members: module, side (outputs 0, inputs 1), channels there, and channels of the group."""
    try:
        from torch_pruning import DependencyGraph
    except ImportError as error:
        raise ImportError("skip connections need Torch-Pruning: pip install 'pyro-radial[pruning]'") from error
    with torch.enable_grad():
        # Batch norms at both ends show what reaches the inputs and outputs.
        first, last = (NORMS[max(0, t.ndim - 3)](t.shape[1]).to(x) for t in (x, net(x)))
        graph = DependencyGraph().build_dependency(nn.Sequential(first, net, last).eval(), x, verbose=False)
    names: dict[Any, str] = {module: name for name, module in net.named_modules()}
    groups = dict[str, list[Any]]()
    for group in graph.get_all_groups():
        modules = [item.dep.target.module for item in group.items]
        if first in modules or last in modules or len(group.items[0].idxs) == 1:
            continue
        members = groups[names[modules[0]]] = []
        for module, item in zip(modules, group.items, strict=True):
            if isinstance(module, (*LAYERS, *NORMS)) or getattr(module, "num_parameters", 1) > 1:
                side = int(isinstance(module, LAYERS) and graph.is_in_channel_pruning_fn(item.dep.handler))
                members.append((names[module], side, torch.tensor(item.idxs), torch.tensor(item.root_idxs)))
    return groups
