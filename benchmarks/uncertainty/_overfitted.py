# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plain networks that trained too long on a part of the images."""

import torch
from torch import nn

from benchmarks.common import Pair
from benchmarks.uncertainty import _networks

__all__ = ["dense", "lenet", "residual", "trained"]


def dense(width: int) -> nn.Module:
    """Two hidden layers, for images as vectors."""
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def lenet() -> nn.Module:
    """LeNet with 44,426 weights, for images as vectors."""
    return nn.Sequential(nn.Unflatten(-1, (1, 28, 28)), _networks.lenet(0.0))


def residual() -> nn.Module:
    """Three blocks with batch norm and 8, 16 and 32 channels, for images as vectors."""
    return nn.Sequential(nn.Unflatten(-1, (1, 28, 28)), _networks.residual_net(8, (1, 1, 1), "cpu", 0.0))


def trained(net: nn.Module, data: Pair, epochs: int, seed: int) -> nn.Module:
    """The network, trained by Adam until it is too sure of itself."""
    x, y = data
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=generator).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
    return net
