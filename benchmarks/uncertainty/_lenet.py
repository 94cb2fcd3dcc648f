# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A small LeNet, for scores of methods and for times of steps."""

from torch import nn


def lenet(dropout: float) -> nn.Sequential:
    """Of 44,426 weights, with dropout between the linear layers."""

    def drop() -> tuple[nn.Module, ...]:
        return (nn.Dropout(dropout),) if dropout else ()

    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(256, 120), nn.ReLU(), *drop()),
        *(nn.Linear(120, 84), nn.ReLU(), *drop(), nn.Linear(84, 10)),
    )
