# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Files that one process at a time may write: locks that end with their holder, and new files under fresh names."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Where there are no such locks, nothing keeps a second writer away.
    fcntl = None  # type: ignore[assignment]

__all__ = ["new_file", "sole_writer"]

PARTIAL = ".partial"


@contextmanager
def sole_writer(path: Path | None) -> Iterator[None]:
    """Be the only writer of a file for a while; a process that dies is none any more, however it dies.

    The lock is a file beside it that is removed at the end, and says nothing once its holder is gone.

    :param Path path: the file, which need not exist, or None for no lock.
    :raises ValueError: naming the file, if another writer lives, or if it is a symbolic link.
    :raises OSError: if its folder cannot be made or written.
    """
    if path is None or fcntl is None:
        yield
        return
    if path.is_symlink():
        raise ValueError(f"checkpoint must be a file of its own, got the symbolic link {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, path)
    try:
        # Nobody else writes here, so these were left by a writer that was killed.
        for left in path.parent.glob(f".{path.name}.*{PARTIAL}"):
            left.unlink(missing_ok=True)
        yield
    finally:
        with suppress(FileNotFoundError):
            lock.unlink()
        os.close(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file beside another, under a name that nobody can foresee, removed at the end unless it was moved.

    :param Path path: the file that it is to replace.
    :returns: the file, open to write, and its path.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        # "x" makes the file or fails, and so follows no link.
        with temporary.open("xb") as file:
            yield file, temporary
    finally:
        temporary.unlink(missing_ok=True)


def _locked(lock: Path, path: Path) -> int:
    """The descriptor of a lock file that is locked and is the one at its path."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise ValueError(
                f"checkpoint {path} is being written by another run; wait for its end, or use another file"
            ) from error
        # Its holder has removed it between the opening and the lock.
        os.close(descriptor)
