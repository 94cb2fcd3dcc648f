# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The images of the quickstart, the notebooks and the benchmarks, as tensors.

``load("digits")`` comes with scikit-learn. The other sets are read from a folder, or downloaded once.
"""

import gzip
import hashlib
import os
import struct
import uuid
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

__all__ = ["Images", "load"]

TIMEOUT = 30.0  # seconds without a byte from the server
CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CLASS_NAMES = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": CLOTHES,
    "retinamnist": ("no retinopathy", "mild", "moderate", "severe", "proliferative"),
}
IDX_FILES = {
    "train_images": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_images": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}
#: The folder that has the four files above, or one archive of all arrays.
URLS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "retinamnist": "https://zenodo.org/records/10519652/files/retinamnist.npz",
}
#: The :func:`digest` of each array.
DIGESTS = {
    "mnist": {
        "train_images": "6bbc9ace898e44ae57da46a324031adb",
        "train_labels": "a25bea736e30d166cdddb491f175f624",
        "test_images": "2646ac647ad5339dbf082846283269ea",
        "test_labels": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion_mnist": {
        "train_images": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train_labels": "9018921c3c673c538a1fc5bad174d6f9",
        "test_images": "8181f5470baa50b63fa0f6fddb340f0a",
        "test_labels": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    "retinamnist": {
        "train_images": "0d7120352ccacf1316dda6377ee75472",
        "train_labels": "e61521ee0fba34c175b7e1fe4937b302",
        "val_images": "f611b9885e6c49ad14c94b0413ce18d8",
        "val_labels": "fff3cab84eae351bb256f0a5e4e3fd63",
        "test_images": "ee64cf2475832448de5b187d0f526863",
        "test_labels": "fc7115a2c69a89b88a602db5d39872d1",
    },
}


@dataclass(frozen=True, eq=False)
class Images:
    """Images (float32 ``[N, C, H, W]`` in ``[0, 1]``) and labels (int64 ``[N]``) as their publisher splits them."""

    class_names: tuple[str, ...]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    val_images: Tensor | None = None
    val_labels: Tensor | None = None


def load(name: str, data_dir: str | Path | None = None) -> Images:
    """Load ``digits``, ``mnist``, ``fashion_mnist`` or ``retinamnist``.

    :param data_dir: a folder with ``NAME.npz`` or ``images/NAME.npz``; by default ``$PYRO_RADIAL_DATA``, then ``data/``
        in the working folder, then the cache, to which a missing set is downloaded.
    """
    if name == "digits":
        return _digits()
    folders = _folders() if data_dir is None else [Path(data_dir)]
    found = [file for folder in folders for file in (folder / f"{name}.npz", folder / "images" / f"{name}.npz")]
    path = next((file for file in found if file.is_file()), None)
    if path is None and data_dir is not None:
        raise FileNotFoundError(f"no {name}.npz and no images/{name}.npz in {data_dir}")
    if path is None:
        path = _download(name, _folders()[-1] / f"{name}.npz")
    tensors = {array: _tensor(array, values) for array, values in _read(name, path, path).items()}
    return Images(CLASS_NAMES[name], **tensors)


def _folders() -> list[Path]:
    named = os.environ.get("PYRO_RADIAL_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_radial"
    return [*([Path(named)] if named else []), Path("data"), cache]


def _download(name: str, path: Path) -> Path:
    """Download a set; the file appears under its name only when it is complete and right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid.uuid4().hex}.npz")
    print(f"downloading {name} to {path}")
    try:
        if URLS[name].endswith(".npz"):
            unfinished.write_bytes(_fetch(URLS[name]))
        else:
            arrays = {array: _idx_array(_fetch(URLS[name] + file)) for array, file in IDX_FILES.items()}
            np.savez_compressed(unfinished, **arrays)
        _read(name, unfinished, URLS[name])
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _fetch(url: str) -> bytes:
    try:
        with urlopen(url, timeout=TIMEOUT) as response:
            content: bytes = response.read()
    except (OSError, HTTPException) as error:
        raise ConnectionError(
            f"cannot download {url}: {error}. To work offline, set PYRO_RADIAL_DATA to a folder that has the set."
        ) from error
    return content


def _idx_array(content: bytes) -> np.ndarray:
    """The array of a gzipped IDX file, the format in which MNIST was published."""
    data = gzip.decompress(content)
    ndim = data[3]
    shape = struct.unpack_from(f">{ndim}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def _read(name: str, path: Path, source: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an archive, each compared with its digest."""
    arrays = {}
    try:
        with path.open("rb") as file, np.load(file) as archive:
            for array, expected in DIGESTS[name].items():
                arrays[array] = archive[array]
                if (found := digest(arrays[array])) != expected:
                    raise ValueError(f"{array} has MD5 {found}, expected {expected}")
    except (EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{source} is damaged: {error}") from error
    return arrays


def digest(array: np.ndarray) -> str:
    """Return the MD5 of an array written as an IDX file, with labels as one row."""
    if array.ndim == 2:
        array = array[:, 0]  # MedMNIST stores labels as a column.
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return hashlib.md5(header + array.tobytes(), usedforsecurity=False).hexdigest()


def _tensor(name: str, values: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(values)
    if name.endswith("_labels"):
        return tensor.flatten().long()
    tensor = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)
    return tensor.contiguous().float().div_(255)


def _digits() -> Images:
    """The 8x8 digits that come with scikit-learn (a part of the UCI set "Optical Recognition of Digits")."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div_(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=digits.target, random_state=0)
    return Images(tuple("0123456789"), images[train], labels[train], images[test], labels[test])
