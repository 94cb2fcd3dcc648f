# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Search folders for a data file, or download it."""

import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from http.client import HTTPException, IncompleteRead
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO
from urllib.error import HTTPError
from urllib.request import urlopen

from tqdm.auto import tqdm

__all__ = ["MAX_BYTES", "cache_folder", "download_file", "search_folders", "write_atomically"]

TIMEOUT = 30.0  # seconds without a byte from the server
TOTAL_TIME = 1800.0  # seconds for one file
MAX_BYTES = 1 << 26  # of one file, also unpacked; the largest here has two thirds of that


def cache_folder() -> Path:
    """Return the folder for downloads: ``pyro_radial`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_radial"


def search_folders(data_dir: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    """Return ``data_dir`` alone, else ``$PYRO_RADIAL_DATA``, ``data/`` in the working folder, and the cache."""
    if data_dir is not None:
        return (Path(data_dir),)
    named = os.environ.get("PYRO_RADIAL_DATA")
    return (*([Path(named)] if named else []), Path.cwd() / "data", cache_folder())


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Write a file that appears under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        with unfinished.open("wb") as stream:
            write(stream)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _open(url: str) -> Any:
    """The server's answer. Its status line and headers have the same deadline, even if each byte comes in time."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(urlopen(url, timeout=TIMEOUT))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=ask, daemon=True).start()  # Nothing interrupts a read of headers.
    if not wait([answer], TOTAL_TIME).done:
        answer.add_done_callback(lambda late: None if late.exception() else late.result().close())
        raise TimeoutError(f"it took more than {TOTAL_TIME:g} seconds, before any content")
    return answer.result()


def download_file(url: str, file: BinaryIO) -> None:
    """Download to an open file, with a progress bar, at most 64 MiB in at most half an hour."""
    deadline, size = time.monotonic() + TOTAL_TIME, 0
    try:
        with _open(url) as response:
            length = response.headers.get("Content-Length")
            total = None if length is None else int(length)
            with tqdm(total=total, unit="B", unit_scale=True, desc=url.rsplit("/", 1)[-1]) as progress:
                # read1 returns what has arrived. Waiting for full chunks would let a slow server take forever.
                while chunk := response.read1(1 << 16):
                    size += file.write(chunk)
                    if size > MAX_BYTES:
                        raise ValueError(f"{url} is damaged: it has {size} bytes or more, expected at most {MAX_BYTES}")
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"it took more than {TOTAL_TIME:g} seconds, after {size} bytes")
                    progress.update(len(chunk))
    except IncompleteRead as error:
        raise ValueError(f"{url} was cut off after {size} bytes: {error}") from error
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise ConnectionError(f"cannot download {url}: {error}") from error
    # When a body is read in pieces, the standard library does not report that it ended too early.
    if total is not None and size != total:
        raise ValueError(f"{url} was cut off after {size} bytes, expected {total}")
