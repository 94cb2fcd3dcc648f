# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small sets of images as tensors."""

import gzip
import hashlib
import os
import struct
import tempfile
import zipfile
import zlib
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from pyro_radial._pyro.checks import check_types, optional, path_of
from pyro_radial.datasets.download import MAX_BYTES, cache_folder, download_file, search_folders, write_atomically

__all__ = ["SOURCES", "ImageDataset", "Source", "idx_digest", "load"]

# What reading damaged bytes raises: a MemoryError for an absurd size, a RuntimeError for an "encrypted" member, ...
DAMAGE = (
    *(EOFError, KeyError, MemoryError, OSError, RuntimeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)


class Source(NamedTuple):
    """Names of the classes, and for every published file (npz or gzipped IDX) the :func:`idx_digest` of its arrays."""

    class_names: tuple[str, ...]
    files: dict[str, dict[str, str]]


_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_RETINA = {
    "train_images": "0d7120352ccacf1316dda6377ee75472",
    "train_labels": "e61521ee0fba34c175b7e1fe4937b302",
    "val_images": "f611b9885e6c49ad14c94b0413ce18d8",
    "val_labels": "fff3cab84eae351bb256f0a5e4e3fd63",
    "test_images": "ee64cf2475832448de5b187d0f526863",
    "test_labels": "fc7115a2c69a89b88a602db5d39872d1",
}

#: The published sets by name. RetinaMNIST numbers the grades; its class names are those of the clinical scale.
SOURCES = {
    "mnist": Source(
        tuple("0123456789"),
        {
            f"{_MNIST}train-images-idx3-ubyte.gz": {"train_images": "6bbc9ace898e44ae57da46a324031adb"},
            f"{_MNIST}train-labels-idx1-ubyte.gz": {"train_labels": "a25bea736e30d166cdddb491f175f624"},
            f"{_MNIST}t10k-images-idx3-ubyte.gz": {"test_images": "2646ac647ad5339dbf082846283269ea"},
            f"{_MNIST}t10k-labels-idx1-ubyte.gz": {"test_labels": "27ae3e4e09519cfbb04c329615203637"},
        },
    ),
    "fashion_mnist": Source(
        _CLOTHES,
        {
            f"{_FASHION}train-images-idx3-ubyte.gz": {"train_images": "f4a8712d7a061bf5bd6d2ca38dc4d50a"},
            f"{_FASHION}train-labels-idx1-ubyte.gz": {"train_labels": "9018921c3c673c538a1fc5bad174d6f9"},
            f"{_FASHION}t10k-images-idx3-ubyte.gz": {"test_images": "8181f5470baa50b63fa0f6fddb340f0a"},
            f"{_FASHION}t10k-labels-idx1-ubyte.gz": {"test_labels": "15d484375f8d13e6eb1aabb0c3f46965"},
        },
    ),
    "retinamnist": Source(
        ("no retinopathy", "mild", "moderate", "severe", "proliferative"),
        {"https://zenodo.org/records/10519652/files/retinamnist.npz": _RETINA},
    ),
}


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images (float32 ``[N, C, H, W]`` in ``[0, 1]``) and labels (int64 ``[N]``) as their publisher splits them."""

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    class_names: tuple[str, ...]
    val_images: torch.Tensor | None = None
    val_labels: torch.Tensor | None = None


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> ImageDataset:
    """Load an image data set by name, downloading it at most once.

    A folder may hold ``NAME.npz`` or ``images/NAME.npz``, an archive of uint8 arrays ``train_images`` (``[N, H, W]``
    or ``[N, H, W, C]``), ``train_labels``, ``test_*`` and, for RetinaMNIST, ``val_*``. By default :func:`load`
    searches ``$PYRO_RADIAL_DATA``, ``data/`` in the working folder, and the cache (``pyro_radial`` in
    ``$XDG_CACHE_HOME`` or ``~/.cache``), and downloads a missing set into the cache. ``digits`` comes with
    scikit-learn and always has the same 1437 training and 360 test images.

    :param name: ``digits``, ``mnist``, ``fashion_mnist`` or ``retinamnist``.
    :param data_dir: the only folder to search.
    :returns: the set, on the CPU; images ``[N, C, H, W]`` are float32 from 0 to 1.
    :raises ValueError: if the name is unknown or a file is damaged.
    :raises FileNotFoundError: if ``data_dir`` lacks the set.
    :raises ConnectionError: if the download fails.
    :raises ImportError: for ``digits`` without scikit-learn.

    Example::

        >>> digits = load("digits")
        >>> digits.train_images.shape, digits.test_images.shape
        (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))
    """
    check_types(str, name=name)
    data_dir = optional(path_of, "data_dir", data_dir)
    if name == "digits":
        return _digits()
    if name not in SOURCES:
        raise ValueError(f"name must be one of {', '.join(sorted(['digits', *SOURCES]))}, got {name!r}")
    source, folders = SOURCES[name], search_folders(data_dir)
    paths = (folder / inner / f"{name}.npz" for folder in folders for inner in (".", "images"))
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        missing = f"no {name}.npz and no images/{name}.npz in {', '.join(map(str, folders))}"
        if data_dir is not None:
            raise FileNotFoundError(missing)
        try:
            path = _fetch(source, cache_folder() / f"{name}.npz")
        except ConnectionError as error:
            hint = "To work offline, place the file in one of these folders or set $PYRO_RADIAL_DATA to its folder."
            raise ConnectionError(f"{error}. Found {missing}. {hint}") from error
    with path.open("rb") as file:
        arrays = _read(file, str(path), ChainMap(*source.files.values()))
    tensors = {array: _tensor(values, is_image=array.endswith("_images")) for array, values in arrays.items()}
    return ImageDataset(name=name, class_names=source.class_names, **tensors)


def _fetch(source: Source, path: Path) -> Path:
    """Download a data set, verify it, and only then store it as an npz archive."""
    arrays: dict[str, Any] = {}
    for url, digests in source.files.items():
        with tempfile.TemporaryFile() as file:
            download_file(url, file)
            arrays |= _read(file, url, digests)
    return write_atomically(path, partial(np.savez_compressed, allow_pickle=False, **arrays))


def _read(file: BinaryIO, where: str, digests: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The arrays of an npz archive or of a gzipped IDX file, with labels as ``[N]``, compared with their digests."""
    arrays = {}
    for name, digest in digests.items():
        file.seek(0)
        try:
            if where.endswith(".npz"):
                with zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as content:
                    if (size := archive.getinfo(f"{name}.npy").file_size) > MAX_BYTES:
                        raise ValueError(f"it unpacks to {size} bytes, expected at most {MAX_BYTES}")
                    array = np.lib.format.read_array(content, allow_pickle=False)
            else:
                array = _idx_array(file)
            if name.endswith("_labels") and array.ndim == 2 and array.shape[1] == 1:
                array = array[:, 0]  # MedMNIST stores labels as a column.
            actual = idx_digest(array)
        except DAMAGE as error:
            raise ValueError(f"{where} is damaged: cannot read array {name!r}: {error}") from error
        if actual != digest:
            raise ValueError(
                f"{where} is damaged: array {name!r} of shape {list(array.shape)} has MD5 {actual}, expected {digest}"
            )
        arrays[name] = array
    return arrays


def _idx_array(file: BinaryIO) -> np.ndarray:
    data = gzip.GzipFile(fileobj=file).read(MAX_BYTES)
    zeros, code, ndim = struct.unpack_from(">HBB", data)
    shape, size = struct.unpack_from(f">{ndim}I", data, 4), len(data) - 4 - 4 * ndim
    if (zeros, code) != (0, 8) or size != prod(shape):
        raise ValueError(f"expected an IDX file of {prod(shape)} unsigned bytes, found {size} bytes of type {code}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def idx_digest(array: np.ndarray) -> str:
    """Return the MD5 of a uint8 array written as an IDX file, the format in which MNIST was published."""
    if array.dtype != np.uint8:
        raise ValueError(f"array must be of dtype uint8, got {array.dtype}")
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()


def _tensor(values: np.ndarray, *, is_image: bool) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if not is_image:
        return tensor.long()
    tensor = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)
    return tensor.contiguous().float().div_(255)


def _digits() -> ImageDataset:
    """The 8x8 digits that come with scikit-learn (a part of the UCI set "Optical Recognition of Digits")."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError("'digits' needs scikit-learn: pip install 'pyro-radial[data]'") from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div_(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=digits.target, random_state=0)
    return ImageDataset("digits", images[train], labels[train], images[test], labels[test], tuple("0123456789"))
