# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The linear layer that a network ends with."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_radial.infer.posthoc.trained_network import TrainedNetwork

__all__ = ["LastLayer", "find_last_layer"]


class LastLayer(NamedTuple):
    """A linear layer by its place in the network, with the sites of its weight and bias; None for one that is fixed."""

    place: str
    weight: str
    bias: str | None

    def features(self, network: TrainedNetwork, x: Any) -> tuple[Tensor, Tensor]:
        """The layer's inputs ``[N, E]``, with a one at the end for a random bias, and the outputs ``[N, K]``."""
        seen: list[Tensor] = []
        layer = network.skeleton.get_submodule(self.place)
        handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            f = network(x)
        finally:
            handle.remove()
        (inputs,) = seen
        return (inputs if self.bias is None else torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)), f

    def matrix(self, values: dict[str, Tensor]) -> Tensor:
        """The random parameters as one matrix ``[K, E]``, with the bias as its last column."""
        weight = values[self.weight]
        return weight if self.bias is None else torch.cat([weight, values[self.bias].unsqueeze(-1)], 1)

    def parts(self, matrix: Tensor) -> dict[str, Tensor]:
        """The values of the sites for such a matrix."""
        if self.bias is None:
            return {self.weight: matrix}
        return {self.weight: matrix[:, :-1], self.bias: matrix[:, -1]}


def find_last_layer(network: TrainedNetwork, x: Any, who: str) -> LastLayer:
    """The linear layer whose output is the network's.

    :param TrainedNetwork network: with its weights.
    :param x: some inputs to try.
    :param str who: what errors call the caller.
    :raises ValueError: for a network that does not end with a linear layer called once with a vector for each row, and
        a weight that is not random or that other layers share.
    """
    outputs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def seen(place: str) -> Any:
        return lambda module, args, output: outputs.setdefault(place, []).append((args[0], output))

    linear = {place: module for place, module in network.skeleton.named_modules() if isinstance(module, nn.Linear)}
    handles = [module.register_forward_hook(seen(place)) for place, module in linear.items()]
    try:
        f = network(x)
    finally:
        for handle in handles:
            handle.remove()
    last = [
        place
        for place, calls in outputs.items()
        if len(calls) == 1 and calls[0][0].dim() == 2 and _is_same(calls[0][1], f)
    ]
    if not last:
        raise ValueError(
            f"{who}: model must have a network that ends with a linear layer, which it calls once with a vector for "
            f"each row, got {type(network.skeleton).__name__} with the linear layers {sorted(linear)}"
        )
    place = last[0]
    weight, bias = (f"{place}.{leaf}" if place else leaf for leaf in ("weight", "bias"))
    owners = [
        name
        for name, parameter in network.skeleton.named_parameters(remove_duplicate=False)
        if parameter is linear[place].weight
    ]
    if weight not in network.values or len(owners) > 1:
        raise ValueError(
            f"{who}: site '{weight}' of the last layer must be random and its own, got a weight of {owners} and the "
            f"sites {sorted(network.values)}"
        )
    return LastLayer(place, weight, bias if bias in network.values else None)


def _is_same(output: Tensor, f: Tensor) -> bool:
    return output.shape == f.shape and output.data_ptr() == f.data_ptr()
