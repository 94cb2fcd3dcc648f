# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Load RetinaMNIST with labels for referral, and make its network and augmentation."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import Pair
from benchmarks.data.augmentation import RandomAffine
from benchmarks.uncertainty._methods import Augment, MakeNet
from benchmarks.uncertainty._networks import vgg
from tutorials import image_sets

#: The grade from which on an image is referred.
REFERABLE = 2


class Fundus(NamedTuple):
    """Standardized images with labels 0 and 1, and what augments those images."""

    train: Pair
    validation: Pair
    test: Pair
    augment: Augment


def fundus(data_dir: Path | None) -> Fundus:
    """RetinaMNIST, each channel standardized by the training images."""
    data = image_sets.load("retinamnist", data_dir)
    assert data.val_images is not None
    assert data.val_labels is not None
    mean = data.train_images.mean((0, 2, 3), keepdim=True)
    stddev = data.train_images.std((0, 2, 3), keepdim=True)

    def pair(images: torch.Tensor, grades: torch.Tensor) -> Pair:
        return (images - mean) / stddev, (grades >= REFERABLE).long()

    return Fundus(
        pair(data.train_images, data.train_labels),
        pair(data.val_images, data.val_labels),
        pair(data.test_images, data.test_labels),
        RandomAffine(fill=tuple((-mean / stddev).flatten().tolist())),
    )


def network(width: int) -> MakeNet:
    """A network for these images, from its dropout rate."""
    return partial(vgg, width=width)
