# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Fundus photographs in a folder with their grades in a table: Kaggle's set for diabetic retinopathy."""

import csv
import hashlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pyro_radial._pyro.checks import positive_count
from pyro_radial.datasets.download import cache_folder

__all__ = ["IMAGE_ENDINGS", "NUM_GRADES", "RetinopathyImages"]

#: What a file must end with to be an image.
IMAGE_ENDINGS = (".jpeg", ".jpg", ".png", ".tif", ".tiff")
#: From none to proliferative.
NUM_GRADES = 5
# Of 255: what is darker is the border around the retina.
DARK = 12


class RetinopathyImages(Dataset[tuple[Tensor, Tensor]]):
    """Photographs and grades of retinopathy, read one by one when they are asked for.

    The set of Kaggle's competition "Diabetic Retinopathy Detection" is a folder of 35,126 photographs,
    ``10_left.jpeg``, and a table ``trainLabels.csv`` with the columns ``image`` and ``level``; that of its test images,
    ``retinopathy_solution.csv``, has a third column, which is passed over. Any other set of this form will do.

    The dark border of a photograph is cut off, what is left is padded to a square with black and resized, and kept in a
    cache, since photographs are large and slow to read. One that is newer than what the cache has is read anew.

    As a torch ``Dataset`` it goes to :func:`~pyro_radial.fit` and :func:`~pyro_radial.predict` as it is, or in a
    ``DataLoader`` whose ``collate_fn`` augments, see :class:`~pyro_radial.datasets.RandomAffine`; checkpoints know it
    by its labels and size. Left and right eyes of one patient are images of their own; whoever splits the set keeps
    them together.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 4.1 and appendix D.1, where
    grades from 2 on are to be told from those below.

    :param folder: of the photographs, ``NAME.jpeg``, or ``.jpg``, ``.png``, ``.tif`` or ``.tiff``.
    :param labels: the table, a CSV file with names of columns in its first line.
    :param int size: of the resized images, in pixels; 512 in the paper, 256 in its study of robustness.
    :param int referable_from: the grade from which on images have label 1, and below 0; the grade itself without it.
        The paper's is 2.
    :param cache_dir: folder for resized images; default ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    :raises ImportError: without Pillow.
    :raises FileNotFoundError: without the folder or the table.
    :raises ValueError: for a folder without images, and naming the table and its line, for one without the columns,
        without a line, an image that is not in the folder or is there twice, and a grade that is not 0 to 4; when it is
        read, naming it, for a damaged image.

    Example::

        >>> images = RetinopathyImages("kaggle/train", "kaggle/trainLabels.csv", referable_from=2)  # doctest: +SKIP
        >>> pixels, label = images[0]  # doctest: +SKIP
        >>> pixels.shape, pixels.dtype, label.dtype  # doctest: +SKIP
        (torch.Size([3, 512, 512]), torch.float32, torch.int64)
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
        self.size = positive_count("RetinopathyImages: size", size)
        if referable_from is not None and referable_from not in range(1, NUM_GRADES):
            raise ValueError(
                f"RetinopathyImages: referable_from must be a grade from 1 to {NUM_GRADES - 1}, got {referable_from!r}"
            )
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
        self._cache = cache_folder(cache_dir) / f"{root.resolve().name}-{place}-{size}"

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Intensities ``[3, size, size]`` in ``[0, 1]``, and the label."""
        pixels = self._pixels(self._files[index])
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), self.labels[index]

    def fingerprint(self) -> str:
        """What a checkpoint knows the data by, without reading the photographs."""
        known = f"{self.size} {self.names} {self.labels.tolist()}"
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def _pixels(self, file: Path) -> np.ndarray:
        cached = self._cache / f"{file.name}.png"
        if cached.exists() and cached.stat().st_mtime >= file.stat().st_mtime:
            try:
                return _read(cached)
            except ValueError:
                # A cache can be made again.
                pass
        pixels = _resized(file, self.size)
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_name(f".{cached.name}.{uuid.uuid4().hex}")
        try:
            _pillow().fromarray(pixels).save(unfinished, "PNG")
            os.replace(unfinished, cached)
        finally:
            unfinished.unlink(missing_ok=True)
        return pixels


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("RetinopathyImages needs Pillow: pip install 'pyro-radial[images]'") from error
    return Image


def _image_files(folder: Path) -> dict[str, Path]:
    """The images of a folder, by their names without endings."""
    if not folder.is_dir():
        raise FileNotFoundError(f"RetinopathyImages: folder must be there, got {folder}")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    if not found:
        raise ValueError(
            f"RetinopathyImages: folder must hold images ({', '.join(IMAGE_ENDINGS)}), got none in {folder}"
        )
    files: dict[str, Path] = {}
    for path in found:
        if path.stem in files:
            raise ValueError(
                f"RetinopathyImages: folder must hold one image of each name, got {files[path.stem].name} and "
                f"{path.name} in {folder}"
            )
        files[path.stem] = path
    return files


def _read_table(table: Path, files: Mapping[str, Path], folder: Path) -> dict[str, int]:
    """Grades by name, each of an image that is there."""
    if not table.is_file():
        raise FileNotFoundError(f"RetinopathyImages: labels must be a file, got {table}")
    graded: dict[str, int] = {}
    with table.open(newline="") as stream:
        reader = csv.DictReader(stream)
        columns = reader.fieldnames or []
        if not {"image", "level"} <= set(columns):
            raise ValueError(
                f"RetinopathyImages: labels must have the columns image and level, got {list(columns)} in {table}"
            )
        for line in reader:
            where = f"{table}, line {reader.line_num}"
            name, level = line["image"], line["level"]
            if name not in files:
                raise ValueError(f"RetinopathyImages: folder must hold every image, got none of {name!r} ({where})")
            if name in graded:
                raise ValueError(f"RetinopathyImages: labels must name an image once, got {name!r} again ({where})")
            if level not in map(str, range(NUM_GRADES)):
                raise ValueError(
                    f"RetinopathyImages: level must be a grade from 0 to {NUM_GRADES - 1}, got {level!r} for {name!r} "
                    f"({where})"
                )
            graded[name] = int(level)
    if not graded:
        raise ValueError(f"RetinopathyImages: labels must have a line for each image, got none in {table}")
    return graded


def _read(file: Path) -> np.ndarray:
    """Pixels ``[H, W, 3]`` as bytes."""
    image = _pillow()
    try:
        with image.open(file) as opened:
            return np.array(opened.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"RetinopathyImages: {file} is damaged or no image: {error}") from error


def _resized(file: Path, size: int) -> np.ndarray:
    """Without its dark border, as a square."""
    from PIL import ImageOps

    image = _pillow().fromarray(_read(file))
    bright = image.convert("L").point(lambda value: 255 * (value > DARK)).getbbox()
    # One that is dark all over, as a few of the real ones are, stays as it is.
    return np.array(ImageOps.pad(image.crop(bright) if bright else image, (size, size)))
