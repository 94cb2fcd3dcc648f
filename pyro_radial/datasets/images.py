# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Small sets of images as tensors."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pyro_radial.datasets.arrays import read_npz, verified
from pyro_radial.datasets.download import cache_folder, fetch
from pyro_radial.datasets.sources import SOURCES, Source

__all__ = ["ImageDataset", "data_folders", "load"]


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
    downloaded into the cache, and so is, with a warning, what is damaged there. ``digits`` is part of scikit-learn,
    so no folder is searched for it; its 1797 images are split once and for all, stratified by class, into 1437 for
    training and 360 for testing.

    The archives hold uint8 arrays: ``train_images`` of shape ``[N, H, W]`` or ``[N, H, W, C]``,
    ``train_labels`` of shape ``[N]`` or ``[N, 1]``, likewise ``test_*`` and, for RetinaMNIST, ``val_*``.

    :param name: ``digits``, ``mnist``, ``fashion_mnist`` or ``retinamnist``.
    :param data_dir: the only folder to search.
    :param cache_dir: folder for downloads; default ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    :param download: whether a missing set may be downloaded.
    :returns: the set; its tensors are on the CPU.
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
        raise ValueError(f"name must be one of {', '.join(sorted(['digits', *SOURCES]))}, got {name!r}")
    source = SOURCES[name]
    folders = data_folders(data_dir, cache_dir)
    for folder in folders:
        for path in (folder / f"{name}.npz", folder / "images" / f"{name}.npz"):
            if path.is_file():
                try:
                    return _read(path, source)
                except ValueError as error:
                    if data_dir is not None or not download or folder != cache_folder(cache_dir):
                        raise
                    warnings.warn(f"{error}; it is downloaded again", stacklevel=2)
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


def data_folders(data_dir: str | os.PathLike[str] | None, cache_dir: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    """Where to search: the folder given, or else those that :func:`load` names."""
    if data_dir is not None:
        return (Path(data_dir),)
    named = os.environ.get("PYRO_RADIAL_DATA")
    return (*([Path(named)] if named else []), Path.cwd() / "data", cache_folder(cache_dir))


def _read(path: Path, source: Source) -> ImageDataset:
    """Read and verify an archive on disk."""
    with path.open("rb") as stream:
        arrays = verified(read_npz(stream, str(path)), source.digests, str(path))
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
