# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Fundus photographs in a folder with their grades in a table, such as Kaggle's set for diabetic retinopathy."""

import csv
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyro_radial.datasets.download import cache_folder, write_atomically

#: Endings of image files.
IMAGE_ENDINGS = (".jpeg", ".jpg", ".png", ".tif", ".tiff")
#: From 0, no retinopathy, to 4, proliferative.
NUM_GRADES = 5
# Pixels below this value (of 255) belong to the border around the retina.
DARK = 12


class RetinopathyImages(Dataset[tuple[Tensor, Tensor]]):
    """Photographs and grades of retinopathy, read one by one on demand.

    Kaggle's competition "Diabetic Retinopathy Detection" published a folder of 35,126 photographs (``10_left.jpeg``)
    and a table ``trainLabels.csv`` with the columns ``image`` and ``level``. The table of its test images,
    ``retinopathy_solution.csv``, has a third column, which is ignored. The dark border of a photograph is cut off; the
    rest is padded to a square with black, resized, and cached. The cache is refreshed if the photograph is newer.
    The left and the right eye of a patient are separate images; keep them together when you split the set.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 4.1 and appendix D.1; their
    task is to tell grades from 2 on from lower ones, with images of 512 pixels (256 in the study of robustness).

    :param folder: folder of photographs, ``NAME.jpeg``, ``.jpg``, ``.png``, ``.tif`` or ``.tiff``.
    :param labels: CSV file with the names of the columns in its first line.
    :param int size: height and width of the resized images in pixels.
    :param int referable_from: lowest grade with label 1; without it, the label is the grade.
    :param cache_dir: folder for resized images; default ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    :raises ImportError: without Pillow.
    :raises FileNotFoundError: without the folder or the table.
    :raises ValueError: if the folder or the table is incomplete or contradictory; on reading, if an image is damaged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        labels: str | os.PathLike[str],
        *,
        size: int = 512,
        referable_from: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _pillow()
        if size < 1:
            raise ValueError(f"size must be a positive integer, got {size!r}")
        self.size = size
        if referable_from is not None and referable_from not in range(1, NUM_GRADES):
            raise ValueError(f"referable_from must be a grade from 1 to {NUM_GRADES - 1}, got {referable_from!r}")
        root, table = Path(folder), Path(labels)
        files = _image_files(root)
        graded = _read_table(table, files, root)
        self._files = [files[name] for name in graded]
        #: Names of the images, in the table's order.
        self.names = list(graded)
        grades = torch.tensor(list(graded.values()))
        #: The label of each image, ``[N]``.
        self.labels = grades if referable_from is None else (grades >= referable_from).long()
        place = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
        self._cache = (
            cache_folder() if cache_dir is None else Path(cache_dir)
        ) / f"{root.resolve().name}-{place}-{size}"

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Intensities ``[3, size, size]`` in ``[0, 1]``, and the label."""
        pixels = self._pixels(self._files[index])
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), self.labels[index]

    def fingerprint(self) -> str:
        """Return a hash of names, labels and size, by which a checkpoint recognizes the data."""
        known = f"{self.size} {self.names} {self.labels.tolist()}"
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def _pixels(self, file: Path) -> np.ndarray:
        cached = self._cache / f"{file.name}.png"
        if cached.exists() and cached.stat().st_mtime >= file.stat().st_mtime:
            try:
                return _read(cached)
            except ValueError:
                pass  # A damaged cache is written again.
        pixels = _resized(file, self.size)
        write_atomically(cached, lambda stream: _pillow().fromarray(pixels).save(stream, "PNG"))
        return pixels


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("RetinopathyImages needs Pillow: pip install pillow") from error
    return Image


def _image_files(folder: Path) -> dict[str, Path]:
    """The images of a folder by name without ending."""
    if not folder.is_dir():
        raise FileNotFoundError(f"folder must be an existing folder, got {folder}")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    if not found:
        raise ValueError(f"folder must hold images ({', '.join(IMAGE_ENDINGS)}), got none in {folder}")
    files: dict[str, Path] = {}
    for path in found:
        if path.stem in files:
            raise ValueError(
                f"folder must hold one image of every name, got {files[path.stem].name} and {path.name} in {folder}"
            )
        files[path.stem] = path
    return files


def _read_table(table: Path, files: Mapping[str, Path], folder: Path) -> dict[str, int]:
    """Grades by the name of the image."""
    if not table.is_file():
        raise FileNotFoundError(f"labels must be a file, got {table}")
    graded: dict[str, int] = {}
    with table.open(newline="") as stream:
        reader = csv.DictReader(stream)
        columns = reader.fieldnames or []
        if not {"image", "level"} <= set(columns):
            raise ValueError(f"labels must have the columns image and level, got {list(columns)} in {table}")
        for line in reader:
            where = f"{table}, line {reader.line_num}"
            name, level = line["image"], line["level"]
            if name not in files:
                raise ValueError(f"folder must hold every image, but {name!r} is missing ({where})")
            if name in graded:
                raise ValueError(f"labels must name an image once, got {name!r} again ({where})")
            if level not in map(str, range(NUM_GRADES)):
                raise ValueError(
                    f"level must be a grade from 0 to {NUM_GRADES - 1}, got {level!r} for {name!r} ({where})"
                )
            graded[name] = int(level)
    if not graded:
        raise ValueError(f"labels must have a line for each image, got none in {table}")
    return graded


def _read(file: Path) -> np.ndarray:
    """The pixels, uint8 ``[H, W, 3]``."""
    image = _pillow()
    try:
        with image.open(file) as opened:
            return np.array(opened.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{file} is not an image or is damaged: {error}") from error


def _resized(file: Path, size: int) -> np.ndarray:
    """The photograph without its dark border, as a square."""
    from PIL import ImageOps

    image = _pillow().fromarray(_read(file))
    bright = image.convert("L").point(lambda value: 255 * (value > DARK)).getbbox()
    # A few of the real photographs are dark all over; they are not cropped.
    return np.array(ImageOps.pad(image.crop(bright) if bright else image, (size, size)))
