# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Tables with a class for each row, as features and labels."""

import gzip
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

Rows = list[list[str]]

MISSING = "?"


class TableSource(NamedTuple):
    """Address, format and digest of a published table.

    :param urls: addresses of its files.
    :param digest: :func:`rows_digest` of its rows.
    :param label: column of the class.
    :param numeric: columns of numbers; all others are categories.
    :param separator: separator of fields, None for white space.
    :param drop_missing: whether to drop rows with a missing field; otherwise "missing" is a category.
    """

    urls: tuple[str, ...]
    digest: str
    label: int
    numeric: tuple[int, ...] = ()
    separator: str | None = ","
    drop_missing: bool = False


class Table(NamedTuple):
    """Features and labels of a table.

    :param features: float32 tensor ``[N, D]``: numbers unchanged, and one indicator per category.
    :param labels: int64 tensor ``[N]``, values ``0`` to ``num_classes - 1``.
    """

    features: torch.Tensor
    labels: torch.Tensor


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"

#: The tables by name, all from the UCI Machine Learning Repository. As in Riquelme, Tucker and Snoek (2018), "Deep
#: Bayesian Bandits Showdown", appendix A, "statlog" is the training file of the shuttle data, and "adult" is both files
#: of the census data without rows that have missing fields, with the occupation as the class.
TABLES: dict[str, TableSource] = {
    "mushroom": TableSource(
        urls=(_UCI + "mushroom/agaricus-lepiota.data",),
        digest="9aaf236b8e254a8107e595473aec9cab",
        label=0,
    ),
    "statlog": TableSource(
        urls=(_UCI + "statlog/shuttle/shuttle.trn.Z",),
        digest="211a7c71dd0d2de9203bdec9f957e6d3",
        label=9,
        numeric=tuple(range(9)),
        separator=None,
    ),
    "adult": TableSource(
        urls=(_UCI + "adult/adult.data", _UCI + "adult/adult.test"),
        digest="779a6204aa629e559c8f48d0897526cf",
        label=6,
        numeric=(0, 2, 4, 10, 11, 12),
        drop_missing=True,
    ),
}


def load_table(name: str, data_dir: str | os.PathLike[str] | None = None) -> Table:
    """Load a table by name.

    A folder holds the publisher's files, plain or gzipped, directly or in a folder ``bandits``.

    :param name: ``mushroom`` (117 features, 2 classes), ``statlog`` (9 features, 7 classes) or ``adult`` (92 features,
        14 occupations).
    :param data_dir: the folder; by default ``$PYRO_RADIAL_DATA``, or ``data`` in the working folder.
    :returns: the table; its tensors are on the CPU.
    :raises ValueError: if a file is damaged.
    :raises FileNotFoundError: if the folder lacks a file, with the address to download it from.
    """
    source = TABLES[name]
    folder = Path(data_dir or os.environ.get("PYRO_RADIAL_DATA") or "data")
    paths = [_found(url, folder) for url in source.urls]
    rows = [row for path in paths for row in _read(path, source.separator)]
    found = rows_digest(rows)
    if found != source.digest:
        raise ValueError(
            f"{' and '.join(map(str, paths))} damaged: {len(rows)} rows have MD5 {found}, expected {source.digest}"
        )
    return _table(source, rows)


def rows_digest(rows: Rows) -> str:
    """Return the MD5 of the fields of all rows, whatever separates, ends or compresses the rows."""
    text = "\n".join(",".join(row) for row in rows)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _found(url: str, folder: Path) -> Path:
    """The file of that name, plain or gzipped."""
    file = url.rsplit("/", 1)[-1].removesuffix(".Z")
    for place in (folder, folder / "bandits"):
        for path in (place / file, place / f"{file}.gz"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {file} and no {file}.gz in {folder}; download and unpack {url}")


def _read(path: Path, separator: str | None) -> Rows:
    """The rows of a file, without comments and empty lines."""
    content = path.read_bytes()
    try:
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("ascii")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged: expected a text of rows, {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    # In the test file of "adult", labels end with a full stop.
    return [
        [field.strip() for field in line.removesuffix(".").split(separator)]
        for line in lines
        if line and not line.startswith("|")
    ]


def _table(source: TableSource, rows: Rows) -> Table:
    kept = [row for row in rows if MISSING not in row] if source.drop_missing else rows
    columns = np.array(kept).T
    features = []
    for number, column in enumerate(columns):
        if number == source.label:
            continue
        if number in source.numeric:
            features.append(column.astype(np.float32))
            continue
        features += [(column == category).astype(np.float32) for category in np.unique(column)]
    labels = np.unique(columns[source.label], return_inverse=True)[1]
    return Table(torch.from_numpy(np.stack(features, 1)), torch.from_numpy(labels).long())
