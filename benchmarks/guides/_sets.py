# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Sets of rows, from a table of 300 rows to 54,000 images, and a network for each."""

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common import Pair, flat_images, perceptron, uci_split
from benchmarks.uncertainty._adult import encoded_adult
from benchmarks.uncertainty._lenet import lenet
from tutorials import image_sets

README, QUICKSTART, ADULT = "first example", "quickstart", "adult"
UCI = ("boston", "concrete", "energy", "power", "wine", "yacht")
FEW_IMAGES, SOME_IMAGES = "784-100-100-10, 500 images", "784-100-100-10, 4,000 images"
PERCEPTRON, DEEP_PERCEPTRON = "784-200x4-10", "784-200x4-10, 30,000 images"
LENET, ALL_IMAGES = "LeNet", "LeNet, 54,000 images"
#: The number of training rows; a set that is not here has as many as its file gives.
ROWS = {
    README: 500,
    QUICKSTART: 200,
    ADULT: 4_000,
    FEW_IMAGES: 500,
    SOME_IMAGES: 4_000,
    PERCEPTRON: 8_000,
    DEEP_PERCEPTRON: 30_000,
    LENET: 8_000,
    ALL_IMAGES: 54_000,
}


def network_of(name: str, inputs: int, dropout: float = 0.0) -> nn.Module:
    """Return the network for a set, with dropout before each linear layer but the first."""
    if name in (LENET, ALL_IMAGES):
        return lenet(dropout)
    if name == QUICKSTART:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(dropout)),
            nn.Linear(128, 10),
        )
    sizes = {
        README: (50, 2),
        ADULT: (100, 100, 2),
        FEW_IMAGES: (100, 100, 10),
        SOME_IMAGES: (100, 100, 10),
        PERCEPTRON: (200, 200, 200, 200, 10),
        DEEP_PERCEPTRON: (200, 200, 200, 200, 10),
    }.get(name, (50, 1))
    return perceptron((inputs, *sizes), dropout=dropout)


def data_of(name: str, scored: int, data_dir: Path, split: int | None = None) -> tuple[Pair, Pair]:
    """Return rows for the training and rows to score; torch's generator chooses them.

    :param scored: the largest number of rows to score; of a UCI set all of the split's are.
    :param split: the split of a UCI set whose test rows are scored, and of other sets the test file; None for rows of
        the training files, where something is chosen by their scores.
    """
    rows = ROWS.get(name, 0)
    if name == README:
        x = torch.randn(rows + scored, 2)
        y = (x[:, 0] * x[:, 1] > 0).long()
        return (x[:rows], y[:rows]), (x[rows:], y[rows:])
    if name == QUICKSTART:
        digits = image_sets.load("digits")
        x = torch.cat([digits.train_images, digits.test_images])
        y = torch.cat([digits.train_labels, digits.test_labels])
        is_wrong = torch.rand(len(y)) < 0.2
        others = (y + torch.randint(1, 10, y.shape)) % 10
        return _parted(x, torch.where(is_wrong, others, y), rows, scored)
    if name in UCI:
        both = uci_split(data_dir, name, split or 0)
        if split is not None:
            return both["train"], both["test"]
        x, y = both["train"]
        number = len(x) // 5
        return _parted(x, y, len(x) - number, number)
    train, test = encoded_adult(data_dir) if name == ADULT else flat_images("fashion_mnist", data_dir)
    if name in (LENET, ALL_IMAGES):
        train, test = ((x.reshape(-1, 1, 28, 28).to(memory_format=torch.channels_last), y) for x, y in (train, test))
    first, others = _parted(*train, rows, scored)
    return first, others if split is None else (test[0][:scored], test[1][:scored])


def _parted(x: Tensor, y: Tensor, number: int, scored: int) -> tuple[Pair, Pair]:
    order = torch.randperm(len(x))
    first, others = order[:number], order[number : number + scored]
    return (x[first], y[first]), (x[others], y[others])
