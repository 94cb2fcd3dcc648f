# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The size of a network: its weights, and the operations of one prediction."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from pyro_radial.compression.graph import LAYERS, Chain, read_chain

__all__ = ["Counts", "chain_flops", "chain_weights", "count_flops", "count_weights"]


class Counts(NamedTuple):
    """A count by the name of the layer, and in total."""

    by_layer: dict[str, int]
    total: int


def count_weights(net: nn.Sequential) -> Counts:
    """Count the weights of the linear layers and convolutions, without biases and without batch norms.

    :param net: a chain, as for :func:`~pyro_radial.compression.cut_network`.
    :returns: the counts.
    :raises ValueError: if the network is not such a chain.

    Example::

        >>> count_weights(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        Counts(by_layer={'0': 12, '2': 6}, total=18)
    """
    return chain_weights(read_chain(net))


def chain_weights(chain: Chain) -> Counts:
    """:func:`count_weights` of a network that is parsed already, with the same arguments and errors."""
    by_layer = {layer.name: layer.module.weight.numel() for layer in chain.layers}
    return Counts(by_layer, sum(by_layer.values()))


def count_flops(net: nn.Sequential, input_shape: Sequence[int]) -> Counts:
    r"""Count the operations of the linear layers and convolutions in one prediction.

    Each output takes one multiply-add per weight that enters it and one for the bias, so that a convolution takes

    .. math:: (K_h K_w C_{in} + 1) \, H_{out} W_{out} C_{out}

    and a linear layer :math:`(I_{in} + 1) I_{out}`. The one is counted whether there is a bias or not.

    Source: Oh, Adamczewski and Park (2019), *Radial and Directional Posteriors for Bayesian Neural Networks*, section
    5.2. The numbers in its table 2 are not those of its formula: they count a layer that no network of the table has,
    from 16 inputs per channel of the last convolution, and leave out the last layer.

    :param net: a chain, as for :func:`~pyro_radial.compression.cut_network`.
    :param input_shape: shape of one input, without the batch.
    :returns: the counts.
    :raises ValueError: if the network is not such a chain, or inputs of that shape do not fit it.

    Example::

        >>> count_flops(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5)), (1, 4, 4))
        Counts(by_layer={'0': 80, '2': 45}, total=125)
    """
    return chain_flops(read_chain(net), input_shape)


def chain_flops(chain: Chain, input_shape: Sequence[int]) -> Counts:
    """:func:`count_flops` of a network that is parsed already, with the same arguments and errors."""
    shapes_only = copy.deepcopy(chain.net).to("meta").eval()
    x = torch.empty(1, *input_shape, dtype=next(chain.net.parameters()).dtype, device="meta")
    by_layer = {}
    for name in chain.names:
        module = shapes_only.get_submodule(name)
        try:
            x = module(x)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"input_shape must fit the network, got {tuple(input_shape)}, which fails at {name!r}: {error}"
            ) from error
        if isinstance(module, LAYERS):
            by_layer[name] = (module.weight[0].numel() + 1) * x.numel()
    return Counts(by_layer, sum(by_layer.values()))
