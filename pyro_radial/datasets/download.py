# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Data sets downloaded into the cache."""

import hashlib
import os
import tempfile
import time
import uuid
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
from tqdm.auto import tqdm

from pyro_radial.datasets.arrays import read_idx, read_npz, verified
from pyro_radial.datasets.sources import Source

__all__ = ["cache_folder", "fetch", "fetch_file"]

TIMEOUT = 30.0  # seconds without a byte from the server
TOTAL_TIME = 1800.0  # seconds for all files of a set
MAX_BYTES = 1 << 26  # of one file, twice the largest of the sets here


def fetch(source: Source, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Download a data set, verify it, and store it in the cache as ``NAME.npz``.

    What is served goes to temporary files, and is read only once its digest is right. Nothing is written to the cache
    before every array is verified, and the file appears under its name in one step. A download ends with an error when
    a file is larger than 64 MiB, or when all of them have taken half an hour.

    :param source: what to download.
    :param cache_dir: folder to write to; default as for :func:`~pyro_radial.datasets.load`.
    :returns: path of the file written.
    :raises ConnectionError: if a server cannot be reached, refuses, or is too slow.
    :raises ValueError: if what it sends is damaged or too large: the message names address and array.
    """
    arrays: dict[str, np.ndarray] = {}
    deadline = time.monotonic() + TOTAL_TIME
    with tempfile.TemporaryDirectory() as temporary:
        for number, url in enumerate(dict.fromkeys(source.urls.values())):
            path = Path(temporary) / str(number)
            _download(url, path, source.file_digests.get(url), deadline)
            arrays.update(_arrays(source, url, path))
    folder = cache_folder(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path, unfinished = folder / f"{source.name}.npz", folder / f".{source.name}.{uuid.uuid4().hex}"
    try:
        with unfinished.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def fetch_file(url: str, folder: Path) -> Path:
    """Download one file as it is into a folder, where it appears under its name in one step.

    :param url: its address, whose last part is its name.
    :param folder: made if missing.
    :returns: path of the file written.
    :raises ConnectionError: if the server cannot be reached, refuses, or is too slow.
    :raises ValueError: naming the address, if what it sends is cut off or too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / url.rsplit("/", 1)[-1]
    unfinished = folder / f".{path.name}.{uuid.uuid4().hex}"
    try:
        _download(url, unfinished, None, time.monotonic() + TOTAL_TIME)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder for downloads.

    :param cache_dir: the folder, or None for the default.
    :returns: the folder given, else ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    """
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_radial"


def _arrays(source: Source, url: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of the file that was served at an address, verified."""
    wanted = [array for array, address in source.urls.items() if address == url]
    if url.endswith(".npz"):
        with path.open("rb") as stream:
            found = read_npz(stream, url)
    else:
        found = {array: read_idx(path.read_bytes(), array, url) for array in wanted}
    return verified(found, {array: source.digests[array] for array in wanted}, url)


def _download(url: str, path: Path, digest: str | None, deadline: float) -> None:
    """Write what is at an address to a file, with a progress bar, and compare its MD5 where that is known."""
    md5, size = hashlib.md5(usedforsecurity=False), 0
    try:
        with urlopen(url, timeout=TIMEOUT) as response, path.open("wb") as file:
            length = response.headers.get("Content-Length")
            total = None if length is None else int(length)
            _check_size(url, total or 0)
            with tqdm(total=total, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1]) as progress:
                # What has come so far, since to wait for a piece of one size would let a slow server take forever.
                while chunk := response.read1(1 << 16):
                    size += file.write(chunk)
                    _check_size(url, size)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"it took more than {TOTAL_TIME:g} seconds, after {size} bytes")
                    md5.update(chunk)
                    progress.update(len(chunk))
    except IncompleteRead as error:
        raise ValueError(f"{url} was cut off after {size} bytes: {error}") from error
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise ConnectionError(f"cannot download {url}: {error}") from error
    # The standard library reports a short answer only to those who read it in one piece.
    if total is not None and size != total:
        raise ValueError(f"{url} was cut off after {size} bytes, expected {total}")
    if digest is not None and md5.hexdigest() != digest:
        raise ValueError(f"{url} is damaged: its {size} bytes have MD5 {md5.hexdigest()}, expected {digest}")


def _check_size(url: str, size: int) -> None:
    if size > MAX_BYTES:
        raise ValueError(f"{url} is damaged: it has {size} bytes or more, expected at most {MAX_BYTES}")
