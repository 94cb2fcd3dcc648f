# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Real data by name or from a folder, checked before use, and what changes images at random."""

from pyro_radial.datasets.arrays import idx_digest
from pyro_radial.datasets.augmentation import RandomAffine
from pyro_radial.datasets.download import fetch
from pyro_radial.datasets.images import ImageDataset, load
from pyro_radial.datasets.retinopathy import RetinopathyImages
from pyro_radial.datasets.sources import SOURCES, Source
from pyro_radial.datasets.tables import TABLES, Table, TableSource, load_table, rows_digest

__all__ = [
    "SOURCES",
    "TABLES",
    "ImageDataset",
    "RandomAffine",
    "RetinopathyImages",
    "Source",
    "Table",
    "TableSource",
    "fetch",
    "idx_digest",
    "load",
    "load_table",
    "rows_digest",
]
