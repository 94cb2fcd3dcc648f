# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Tables with a class for each row, as features and labels."""

import gzip
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pyro_radial.datasets.download import cache_folder, fetch_file
from pyro_radial.datasets.images import data_folders
from pyro_radial.datasets.lzw import decompress

__all__ = ["TABLES", "Table", "TableSource", "load_table", "rows_digest"]

Rows = list[list[str]]

MISSING = "?"


@dataclass(frozen=True)
class TableSource:
    """Where a table is published, how it is read, and how to know that a copy of it is intact.

    :param name: name of the table.
    :param urls: for each file of it, its address; the last part is the file's name.
    :param digest: what :func:`rows_digest` gives for its rows.
    :param label: the column of the class.
    :param numeric: the columns of numbers; all others are categories.
    :param separator: what stands between fields, None for white space.
    :param drop_missing: whether rows with a missing field are left out; else missing is a category.
    """

    name: str
    urls: tuple[str, ...]
    digest: str
    label: int
    numeric: tuple[int, ...] = ()
    separator: str | None = ","
    drop_missing: bool = False


@dataclass(frozen=True, eq=False)
class Table:
    """Features and labels of a table.

    :param name: name under which :func:`load_table` knows it.
    :param features: float32 tensor ``[N, D]``: numbers as they are, and a zero or one for each category.
    :param labels: int64 tensor ``[N]``, values ``0`` to ``num_classes - 1``.
    :param class_names: one name per class, sorted.
    :param feature_names: one name per feature: the column, and the category where there is one.
    """

    name: str
    features: torch.Tensor
    labels: torch.Tensor
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"

#: The tables by name, each from the UCI Machine Learning Repository. Of the shuttle data it is the training file, and
#: of adult both files without the rows with missing fields and with the occupation as the class, as in Riquelme, Tucker
#: and Snoek (2018), "Deep Bayesian Bandits Showdown", appendix A.
TABLES: dict[str, TableSource] = {
    "mushroom": TableSource(
        name="mushroom",
        urls=(_UCI + "mushroom/agaricus-lepiota.data",),
        digest="9aaf236b8e254a8107e595473aec9cab",
        label=0,
    ),
    "statlog": TableSource(
        name="statlog",
        urls=(_UCI + "statlog/shuttle/shuttle.trn.Z",),
        digest="211a7c71dd0d2de9203bdec9f957e6d3",
        label=9,
        numeric=tuple(range(9)),
        separator=None,
    ),
    "adult": TableSource(
        name="adult",
        urls=(_UCI + "adult/adult.data", _UCI + "adult/adult.test"),
        digest="779a6204aa629e559c8f48d0897526cf",
        label=6,
        numeric=(0, 2, 4, 10, 11, 12),
        drop_missing=True,
    ),
}


def load_table(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> Table:
    """Load a table by name, downloading it at most once.

    A folder may hold the publisher's files, as they are or compressed by gzip, themselves or in a folder ``bandits``.
    Folders are searched as by :func:`~pyro_radial.datasets.load`.

    :param name: ``mushroom`` (117 features, 2 classes), ``statlog`` (9 features, 7 classes) or ``adult`` (92 features,
        14 occupations).
    :param data_dir: the only folder to search.
    :param cache_dir: folder for downloads; default ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    :param download: whether a missing table may be downloaded.
    :returns: the table; its tensors are on the CPU.
    :raises ValueError: if the name is unknown, or naming the files if they are damaged.
    :raises FileNotFoundError: if ``data_dir`` is given and lacks a file, or if ``download`` is false and no folder has
        it.
    :raises ConnectionError: if the download fails.
    """
    if name not in TABLES:
        raise ValueError(f"name must be one of {', '.join(sorted(TABLES))}, got {name!r}")
    source = TABLES[name]
    folders = data_folders(data_dir, cache_dir)
    paths = []
    for url in source.urls:
        path = _found(url.rsplit("/", 1)[-1], folders)
        if path is None:
            missing = f"no {url.rsplit('/', 1)[-1]} in {', '.join(map(str, folders))}"
            if data_dir is not None or not download:
                raise FileNotFoundError(missing)
            path = fetch_file(url, cache_folder(cache_dir))
        paths.append(path)
    rows = [row for path in paths for row in _read(path, source.separator)]
    if (digest := rows_digest(rows)) != source.digest:
        raise ValueError(
            f"{' and '.join(map(str, paths))} damaged: {len(rows)} rows have MD5 {digest}, expected {source.digest}"
        )
    return _table(source, rows)


def rows_digest(rows: Rows) -> str:
    """MD5 of the fields of all rows: one digest for every way to separate, to end and to compress them.

    :param rows: of fields.
    :returns: 32 hexadecimal digits.

    Example::

        >>> rows_digest([["a", "1"], ["b", "2"]])
        'c1bdda5b43670970a59fdc3fae54b593'
    """
    text = "\n".join(",".join(row) for row in rows)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _found(name: str, folders: Sequence[Path]) -> Path | None:
    """The first file of that name, itself or compressed."""
    stem = name.removesuffix(".Z")
    for folder in folders:
        for place in (folder, folder / "bandits"):
            for candidate in dict.fromkeys((name, stem, f"{stem}.gz")):
                if (place / candidate).is_file():
                    return place / candidate
    return None


def _read(path: Path, separator: str | None) -> Rows:
    """The rows of a file; those of comments, and empty ones, are none."""
    unpack: Callable[[bytes], bytes] = {".gz": gzip.decompress, ".Z": decompress}.get(path.suffix, bytes)
    try:
        text = unpack(path.read_bytes()).decode("ascii")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged: expected a text of rows, {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    # Labels of adult's test file end in a full stop.
    return [
        [field.strip() for field in line.removesuffix(".").split(separator)]
        for line in lines
        if line and not line.startswith("|")
    ]


def _table(source: TableSource, rows: Rows) -> Table:
    kept = [row for row in rows if MISSING not in row] if source.drop_missing else rows
    columns = np.array(kept).T
    features, names = [], []
    for number, column in enumerate(columns):
        if number == source.label:
            continue
        if number in source.numeric:
            features.append(column.astype(np.float32))
            names.append(str(number))
            continue
        categories = np.unique(column)
        features += [(column == category).astype(np.float32) for category in categories]
        names += [f"{number}={category}" for category in categories]
    classes, labels = np.unique(columns[source.label], return_inverse=True)
    return Table(
        source.name,
        torch.from_numpy(np.stack(features, 1)),
        torch.from_numpy(labels).long(),
        tuple(map(str, classes)),
        tuple(names),
    )
