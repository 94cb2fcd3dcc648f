# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A residual network for small images, for scores of methods and for pruning."""

from torch import Tensor, nn
from torch.nn.functional import relu


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
        """Return the sum of both branches, rectified."""
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
