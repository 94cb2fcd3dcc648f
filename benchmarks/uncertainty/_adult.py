# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The table Adult: people of a census, and whether they earn more than 50,000 dollars."""

import gzip
from pathlib import Path

import numpy as np
import torch
from sklearn.compose import make_column_transformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks.common import Pair

# The columns that are categories.
CATEGORIES = [1, 3, 5, 6, 7, 8, 9, 13]


def adult(data_dir: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of Adult: objects, where ``?`` is a category, and whether the income is above 50,000 dollars."""
    with gzip.open(data_dir / "bandits" / f"adult.{part}.gz", "rt") as file:
        rows = [line.rstrip(".\n").split(", ") for line in file if line.count(",") == 14]
    table = np.array(rows, dtype=object)
    for column in range(14):
        if column not in CATEGORIES:
            table[:, column] = table[:, column].astype(float)
    return table[:, :14], table[:, 14] == ">50K"


def encoded_adult(data_dir: Path) -> tuple[Pair, Pair]:
    """Return the training and the test rows of adult, with a column for each category and standardized numbers."""
    (table, labels), (test_table, test_labels) = (adult(data_dir, part) for part in ("data", "test"))
    numbers = [column for column in range(table.shape[1]) if column not in CATEGORIES]
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    columns = make_column_transformer((encoder, CATEGORIES), (StandardScaler(), numbers))
    encoded = columns.fit_transform(table), columns.transform(test_table)
    x, test_x = (torch.tensor(np.asarray(part, dtype=np.float32)) for part in encoded)
    return (x, torch.tensor(labels).long()), (test_x, torch.tensor(test_labels).long())
