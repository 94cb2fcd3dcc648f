# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Convolutional networks for photographs and small images."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

#: Convolutions of each block, and their channels in units of the width; a block for each size down to 7 x 7.
VGG4 = ((1, 1), (1, 2), (2, 4))


class MeanAndMaxPool(nn.Module):
    """The mean and the maximum of each channel over all places, ``[N, C, H, W]`` to ``[N, 2 C]``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean((-2, -1)), x.amax((-2, -1))], -1)


def vgg(dropout: float = 0.0, *, width: int) -> nn.Sequential:
    """A network like VGG with both global pools in the place of its fully connected layers: paper 000, appendix D.1.

    :param dropout: rate of the dropout at the end of each block, without which there is none.
    :param width: channels of the first convolutions.
    """
    layers: list[nn.Module] = []
    channels = 3
    for number, (convolutions, multiple) in enumerate(VGG4):
        if number:
            layers.append(nn.MaxPool2d(2))
        for _ in range(convolutions):
            layers += [_started(nn.Conv2d(channels, multiple * width, 3, padding=1)), nn.ReLU()]
            channels = multiple * width
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, MeanAndMaxPool(), nn.Linear(2 * channels, 2))


def _started(layer: nn.Conv2d) -> nn.Conv2d:
    """With the start of He et al. (2015), which keeps the size of signals through any number of layers."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


def lenet(dropout: float) -> nn.Module:
    """Of 44,426 weights, with dropout between the linear layers."""

    def drop() -> tuple[nn.Module, ...]:
        return (nn.Dropout(dropout),) if dropout else ()

    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), *drop()),
        *(nn.Linear(120, 84), nn.ReLU(), *drop(), nn.Linear(84, 10)),
    )


class Block(nn.Module):
    """Two convolutions with batch norm, beside the identity or a convolution of single pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.beside = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y if self.dropout is None else self.dropout(y)))
        return relu(y + (x if self.beside is None else self.beside(x)))


def residual_net(width: int, blocks: tuple[int, ...], dropout: float) -> nn.Module:
    """Stages of blocks, then the mean over pixels and a linear layer; the first convolution halves the image.

    Source: He, Zhang, Ren and Sun (2016), "Deep Residual Learning for Image Recognition". Dropout, if any, is where
    Zagoruyko and Komodakis (2016), "Wide Residual Networks" have it, between the convolutions of a block.
    """
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            outputs = width * 2**stage
            layers.append(Block(inputs, outputs, 2 if stage and not block else 1, dropout))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))
