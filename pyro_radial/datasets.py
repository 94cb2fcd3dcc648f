# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small image data sets as tensors, each checked against a known digest before use.

``digits`` comes with scikit-learn. The others are read from a local ``NAME.npz`` or, failing that,
downloaded once into the cache. MNIST and Fashion-MNIST come as the original gzipped IDX files: their digests
are published and they need no reader beyond NumPy, while OpenML's copies hold the same pixels as tables of
floats. RetinaMNIST has one publisher, MedMNIST's archive on Zenodo.
"""

import gzip
import hashlib
import io
import os
import struct
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from math import prod
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import torch
from tqdm import tqdm

__all__ = ["SOURCES", "ImageDataset", "Source", "fetch", "idx_digest", "load"]

TIMEOUT = 30.0  # seconds without a byte from the server

# What damaged bytes raise: a MemoryError from an absurd size, a RuntimeError from an "encrypted" member, ...
_DAMAGE = (
    *(EOFError, MemoryError, OSError, RuntimeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Images and labels of one data set, split as its publisher splits it.

    :param name: name under which :func:`load` knows the set.
    :param train_images: float32 tensor of shape ``[N, C, H, W]``, intensities in ``[0, 1]``.
    :param train_labels: int64 tensor of shape ``[N]``, values ``0`` to ``num_classes - 1``.
    :param test_images: as ``train_images``.
    :param test_labels: as ``train_labels``.
    :param class_names: one name per class.
    :param val_images: as ``train_images``; None where the publisher has no validation split.
    :param val_labels: as ``train_labels``, or None.
    """

    name: str
    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    class_names: tuple[str, ...]
    val_images: torch.Tensor | None = None
    val_labels: torch.Tensor | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


@dataclass(frozen=True)
class Source:
    """Where a data set is published, and how to know that a copy of it is intact.

    :param name: name of the set; its file is ``NAME.npz``.
    :param class_names: one name per class.
    :param digests: MD5 of every array (``train_images``, ``train_labels``, ...), see :func:`idx_digest`.
    :param urls: for every array, the address of its gzipped IDX file or of an ``.npz`` archive that holds it.
    """

    name: str
    class_names: tuple[str, ...]
    digests: Mapping[str, str]
    urls: Mapping[str, str]


def _idx_urls(base: str) -> dict[str, str]:
    return {
        "train_images": base + "train-images-idx3-ubyte.gz",
        "train_labels": base + "train-labels-idx1-ubyte.gz",
        "test_images": base + "t10k-images-idx3-ubyte.gz",
        "test_labels": base + "t10k-labels-idx1-ubyte.gz",
    }


_FASHION_CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_RETINA_DIGESTS = {
    "train_images": "0d7120352ccacf1316dda6377ee75472",
    "train_labels": "e61521ee0fba34c175b7e1fe4937b302",
    "val_images": "f611b9885e6c49ad14c94b0413ce18d8",
    "val_labels": "fff3cab84eae351bb256f0a5e4e3fd63",
    "test_images": "ee64cf2475832448de5b187d0f526863",
    "test_labels": "fc7115a2c69a89b88a602db5d39872d1",
}
_RETINA_URL = "https://zenodo.org/records/10519652/files/retinamnist.npz"

#: The published sets by name.
SOURCES: dict[str, Source] = {
    "mnist": Source(
        name="mnist",
        class_names=tuple("0123456789"),
        digests={
            "train_images": "6bbc9ace898e44ae57da46a324031adb",
            "train_labels": "a25bea736e30d166cdddb491f175f624",
            "test_images": "2646ac647ad5339dbf082846283269ea",
            "test_labels": "27ae3e4e09519cfbb04c329615203637",
        },
        urls=_idx_urls("https://ossci-datasets.s3.amazonaws.com/mnist/"),
    ),
    "fashion_mnist": Source(
        name="fashion_mnist",
        class_names=_FASHION_CLASSES,
        digests={
            "train_images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "train_labels": "9018921c3c673c538a1fc5bad174d6f9",
            "test_images": "8181f5470baa50b63fa0f6fddb340f0a",
            "test_labels": "15d484375f8d13e6eb1aabb0c3f46965",
        },
        urls=_idx_urls("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
    ),
    "retinamnist": Source(
        name="retinamnist",
        # MedMNIST numbers the grades; these are the names of the clinical scale behind them.
        class_names=("no retinopathy", "mild", "moderate", "severe", "proliferative"),
        digests=_RETINA_DIGESTS,
        urls=dict.fromkeys(_RETINA_DIGESTS, _RETINA_URL),
    ),
}


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> ImageDataset:
    """Load an image data set by name, downloading it at most once.

    A folder may hold ``NAME.npz`` or ``images/NAME.npz``. Only ``data_dir`` is searched if it is given; else
    ``$PYRO_RADIAL_DATA``, then ``data/`` in the working folder, then the cache. What is found nowhere is
    downloaded into the cache. ``digits`` is part of scikit-learn, so no folder is searched for it; its 1797
    images are split once and for all, stratified by class, into 1437 for training and 360 for testing.

    The archives hold uint8 arrays: ``train_images`` of shape ``[N, H, W]`` or ``[N, H, W, C]``,
    ``train_labels`` of shape ``[N]`` or ``[N, 1]``, likewise ``test_*`` and, for RetinaMNIST, ``val_*``.

    :param name: ``digits``, ``mnist``, ``fashion_mnist`` or ``retinamnist``.
    :param data_dir: the only folder to search.
    :param cache_dir: folder for downloads; default ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    :param download: whether a missing set may be downloaded.
    :raises ValueError: if the name is unknown, or if a file is damaged: the message names file and array.
    :raises FileNotFoundError: if ``data_dir`` is given and lacks the set, or if ``download`` is false and no
        folder has it.
    :raises ConnectionError: if the download fails.
    :raises ImportError: for ``digits`` without scikit-learn.

    Example::

        >>> digits = load("digits")
        >>> digits.train_images.shape, digits.num_classes
        (torch.Size([1437, 1, 8, 8]), 10)
    """
    if name == "digits":
        return _digits()
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(sorted(['digits', *SOURCES]))}")
    source = SOURCES[name]
    folders = _folders(data_dir, cache_dir)
    for folder in folders:
        for path in (folder / f"{name}.npz", folder / "images" / f"{name}.npz"):
            if path.is_file():
                return _read(path, source)
    missing = f"no {name}.npz and no images/{name}.npz in {', '.join(map(str, folders))}"
    if data_dir is not None or not download:
        raise FileNotFoundError(missing)
    try:
        return _read(fetch(source, cache_dir), source)
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}. There is {missing}. To do without the network, place the file in one of these folders "
            f"or name its folder in $PYRO_RADIAL_DATA; it holds the uint8 arrays {', '.join(source.digests)}."
        ) from error


def fetch(source: Source, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Download a data set, verify it, and store it in the cache as ``NAME.npz``.

    Nothing is written before every array is verified, and the file appears under its name in one step.

    :param source: what to download.
    :param cache_dir: folder to write to; default as for :func:`load`.
    :returns: path of the file written.
    :raises ConnectionError: if a server cannot be reached or refuses.
    :raises ValueError: if what it sends is damaged: the message names address and array.
    """
    arrays: dict[str, np.ndarray] = {}
    for url in dict.fromkeys(source.urls.values()):
        content = _download(url)
        wanted = [array for array, address in source.urls.items() if address == url]
        if url.endswith(".npz"):
            found = _read_npz(io.BytesIO(content), url)
        else:
            found = {array: _read_idx(content, array, url) for array in wanted}
        arrays.update(_verify(found, {array: source.digests[array] for array in wanted}, url))
    folder = _cache(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path, unfinished = folder / f"{source.name}.npz", folder / f".{source.name}.{uuid.uuid4().hex}"
    try:
        with unfinished.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def idx_digest(array: np.ndarray) -> str:
    """MD5 of an array written as an IDX file, the format in which MNIST was published.

    The file is two zero bytes, the type code 8 (unsigned byte), the number of dimensions, each size as a
    big-endian 32-bit integer, then the bytes in row-major order (LeCun, Cortes and Burges, *The MNIST
    database*). One digest serves every container: IDX file, npz archive, array in memory. It guards against
    damage, not against forgery.

    :param array: uint8 array of any shape.
    :raises ValueError: if the array is not uint8.

    Example::

        >>> idx_digest(np.zeros((2, 3), dtype=np.uint8))
        '3f925bb2f8977f5ba2add3bce51c0f66'
    """
    if array.dtype != np.uint8:
        raise ValueError(f"array has dtype {array.dtype}, expected uint8")
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()


def _cache(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_radial"


def _folders(data_dir: str | os.PathLike[str] | None, cache_dir: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    if data_dir is not None:
        return (Path(data_dir),)
    named = os.environ.get("PYRO_RADIAL_DATA")
    return (*([Path(named)] if named else []), Path.cwd() / "data", _cache(cache_dir))


def _read(path: Path, source: Source) -> ImageDataset:
    """Read and verify an archive on disk."""
    with path.open("rb") as stream:
        arrays = _verify(_read_npz(stream, str(path)), source.digests, str(path))
    tensors = {
        array: _images(value) if array.endswith("_images") else torch.from_numpy(value).long()
        for array, value in arrays.items()
    }
    return ImageDataset(name=source.name, class_names=source.class_names, **tensors)


def _images(pixels: np.ndarray) -> torch.Tensor:
    """Bytes ``[N, H, W]`` or ``[N, H, W, C]`` to intensities ``[N, C, H, W]``."""
    images = torch.from_numpy(pixels)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images.contiguous().float().div_(255)


def _verify(arrays: Mapping[str, np.ndarray], digests: Mapping[str, str], where: str) -> dict[str, np.ndarray]:
    """Pick the arrays that have a digest, labels as ``[N]``, and raise unless every one is intact."""
    verified = {}
    for name, digest in digests.items():
        if name not in arrays:
            raise ValueError(f"{where} is damaged: it lacks array {name!r}; it has {sorted(arrays)}")
        array = arrays[name]
        if array.dtype != np.uint8:
            raise ValueError(f"{where} is damaged: array {name!r} has dtype {array.dtype}, expected uint8")
        if name.endswith("_labels") and array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]  # MedMNIST keeps labels as a column.
        if (actual := idx_digest(array)) != digest:
            raise ValueError(
                f"{where} is damaged: array {name!r} of shape {list(array.shape)} has MD5 {actual}, expected {digest}"
            )
        verified[name] = array
    return verified


def _read_npz(stream: IO[bytes], where: str) -> dict[str, np.ndarray]:
    """All arrays of an npz archive."""
    name = None
    try:
        with zipfile.ZipFile(stream) as archive:
            arrays = {}
            for member in archive.namelist():
                name = member.removesuffix(".npy")
                with archive.open(member) as content:
                    arrays[name] = np.lib.format.read_array(content, allow_pickle=False)
            return arrays
    except _DAMAGE as error:
        part = "" if name is None else f": array {name!r}"
        raise ValueError(f"{where} is damaged{part}: expected an npz archive of arrays, {error}") from error


def _read_idx(content: bytes, name: str, where: str) -> np.ndarray:
    """The array of a gzipped IDX file of unsigned bytes."""
    try:
        data = gzip.decompress(content)
        zeros, code, ndim = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{ndim}I", data, 4)
    except _DAMAGE as error:
        raise ValueError(f"{where} is damaged: array {name!r}: expected a gzipped IDX file, {error}") from error
    size = len(data) - 4 - 4 * ndim
    if (zeros, code) != (0, 8) or size != prod(shape):
        raise ValueError(
            f"{where} is damaged: array {name!r}: expected an IDX file of {prod(shape)} unsigned bytes, "
            f"found {size} bytes of type {code}"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def _download(url: str) -> bytes:
    """Content at an address, with a progress bar; at most 31 MB for the sets here, so it stays in memory."""
    content = io.BytesIO()
    try:
        with urlopen(url, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            total = None if length is None else int(length)
            with tqdm(total=total, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1]) as progress:
                while chunk := response.read(1 << 16):
                    progress.update(content.write(chunk))
    except IncompleteRead as error:
        raise ValueError(f"{url} was cut off after {content.tell()} bytes: {error}") from error
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise ConnectionError(f"cannot download {url}: {error}") from error
    # The standard library reports a short answer only to those who read it in one piece.
    if total is not None and content.tell() != total:
        raise ValueError(f"{url} was cut off after {content.tell()} bytes, expected {total}")
    return content.getvalue()


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
    return ImageDataset(
        name="digits",
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        class_names=tuple(str(name) for name in digits.target_names),
    )
