# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Data sets downloaded into the cache."""

import io
import os
import uuid
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
from tqdm import tqdm

from pyro_radial.datasets.arrays import read_idx, read_npz, verified
from pyro_radial.datasets.sources import Source

__all__ = ["cache_folder", "fetch"]

TIMEOUT = 30.0  # seconds without a byte from the server


def fetch(source: Source, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Download a data set, verify it, and store it in the cache as ``NAME.npz``.

    Nothing is written before every array is verified, and the file appears under its name in one step.

    :param source: what to download.
    :param cache_dir: folder to write to; default as for :func:`~pyro_radial.datasets.load`.
    :returns: path of the file written.
    :raises ConnectionError: if a server cannot be reached or refuses.
    :raises ValueError: if what it sends is damaged: the message names address and array.
    """
    arrays: dict[str, np.ndarray] = {}
    for url in dict.fromkeys(source.urls.values()):
        content = _download(url)
        wanted = [array for array, address in source.urls.items() if address == url]
        if url.endswith(".npz"):
            found = read_npz(io.BytesIO(content), url)
        else:
            found = {array: read_idx(content, array, url) for array in wanted}
        arrays.update(verified(found, {array: source.digests[array] for array in wanted}, url))
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


def cache_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder for downloads.

    :param cache_dir: the folder, or None for the default.
    :returns: the folder given, else ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    """
    if cache_dir is not None:
        return Path(cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_radial"


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
