# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Real data by name or from a folder, checked before use, and what changes images at random."""

from pyro_radial.datasets.arrays import idx_digest
from pyro_radial.datasets.augmentation import RandomAffine
from pyro_radial.datasets.download import fetch
from pyro_radial.datasets.images import ImageDataset, load
from pyro_radial.datasets.retinopathy import RetinopathyImages
from pyro_radial.datasets.sources import SOURCES, Source

__all__ = ["SOURCES", "ImageDataset", "RandomAffine", "RetinopathyImages", "Source", "fetch", "idx_digest", "load"]
