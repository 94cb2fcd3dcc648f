# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The table Adult: people of a census, and whether they earn more than 50,000 dollars."""

import gzip
from pathlib import Path

import numpy as np

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
