# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The file that a run resumes from."""

import copy
import glob
import hashlib
import io
import os
import pickle
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from pyro_radial._pyro.compat import tree_map_only

try:
    import fcntl
except ImportError:  # Without such locks, nothing keeps a second writer away.
    fcntl = None  # type: ignore[assignment]

FORMAT = 4
# A file ends with this mark and a digest of everything before it; torch.load ignores both.
MARK = b"pyro_radial.sha256="
DIGEST_SIZE = hashlib.sha256().digest_size
CPU = torch.device("cpu")

State = dict[str, Any]


class Checkpoint:
    """Keep the state of a run in one file.

    A kill at any moment leaves the old file or the new one. As a context manager it holds the file: a second run that
    writes the same path gets an error until the first one ends, however it ends.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or not str(path):
            raise ValueError(f"checkpoint must be the path of a file, got {path!r}")
        self.path = Path(path)
        self._lock: int | None = None

    def __enter__(self) -> "Checkpoint":
        """Become the only writer of the file, or raise a ValueError if another run writes it."""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ValueError(
                f"checkpoint must be a regular file, got {self.path}, a folder, link or pipe"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if fcntl is not None:
            self._lock = self._acquire()
            # Nobody else writes here, so a killed writer left these.
            for left in self.path.parent.glob(
                f".{glob.escape(self.path.name)}.{'[0-9a-f]' * 16}.partial"
            ):
                left.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Let others write the file."""
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def save(self, state: State, *, dry_run: bool = False) -> None:
        """Replace the file in one step; a dry run only checks that the state can be written and read back."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A random name and mode "x", so that no link prepared by others is followed.
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.partial")
        try:
            with temporary.open("x+b") as file:
                _save(to_plain({"format": FORMAT, **state}), file)
                file.seek(0)
                # Reads to the end of the file, where the digest belongs.
                digest = hashlib.file_digest(file, "sha256").digest()
                file.write(MARK + digest)
                file.flush()
                os.fsync(file.fileno())
            # Reads only the structure, not the tensors.
            torch.load(str(temporary), map_location="cpu", weights_only=True, mmap=True)
            if not dry_run:
                os.replace(temporary, self.path)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise ValueError(
                f"checkpoint {self.path} can hold only tensors and plain values; get_extra_state of a module and "
                f"state_dict of a callback must return such values: {error}"
            ) from error
        except OSError as error:
            reason = f"checkpoint cannot be written: {error.strerror or error}"
            raise OSError(error.errno, reason, str(self.path)) from error
        finally:
            temporary.unlink(missing_ok=True)

    def load(self, device: torch.device = CPU, needed: Iterable[str] = ()) -> State | None:
        """Return what :meth:`save` wrote, on a device, or None if there is no file.

        :raises ValueError: if the file is damaged, or lacks entries that are needed.
        """
        if not self.path.exists():
            return None
        content = memoryview(self.path.read_bytes())
        size = len(content) - DIGEST_SIZE - len(MARK)
        body = content[:size]
        end = content[size:]
        if end != MARK + hashlib.sha256(body).digest():
            raise ValueError(
                f"checkpoint {self.path} is damaged or not a checkpoint: its digest does not match"
            )
        # Not every device is one that torch.load knows.
        state: State = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        missing = sorted({*needed} - state.keys())
        if state.get("format") != FORMAT or missing:
            raise ValueError(
                f"checkpoint {self.path} is not from this version of this function: "
                + (
                    f"it lacks {missing}"
                    if missing
                    else f"its format is {state.get('format')}, expected {FORMAT}"
                )
            )
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), state)

    def check(self, saved: Mapping[str, Any], current: Mapping[str, Any], name: str = "") -> None:
        """Raise a ValueError that names the first setting that differs from the file, with both values."""
        for setting, there, here in differences(saved, current, name):
            raise ValueError(
                f"checkpoint {self.path} was made with {setting}={there!r}, this run has {setting}={here!r}; "
                "use the same settings to resume, or another checkpoint file to start anew"
            )

    def check_entries(
        self, role: str, saved: Mapping[str, Any], current: Mapping[str, Any]
    ) -> None:
        """Raise a ValueError if names, shapes or dtypes of a state dict differ from those in the file."""
        found = sorted(differences(entry_kinds(saved), entry_kinds(current)))
        if found:
            listed = "; ".join(
                f"{name}: here {here}, there {there}" for name, there, here in found[:3]
            )
            raise ValueError(
                f"checkpoint {self.path} is from another {role}: {len(found)} entries differ ({listed})"
            )

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")

    def _acquire(self) -> int:
        """Return the descriptor of the locked file at the lock's path."""
        lock = self._lock_path
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat()):
                    return descriptor
            except BlockingIOError as error:
                os.close(descriptor)
                raise ValueError(
                    f"checkpoint {self.path} is being written by another run; wait for its end, or use another file"
                ) from error
            # Its holder removed it between our opening and our locking.
            os.close(descriptor)


def _save(state: State, file: IO[bytes]) -> None:
    """Write a state, and raise the error of the file itself if there is one."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch hides the error of the file, or Ctrl-C, behind its own.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise


def to_plain(value: Any) -> Any:
    """Replace NumPy's numbers by equal Python numbers, which can be read back."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    return value


def copy_state(state_dict: Mapping[str, Any]) -> State:
    """Copy a module's state dict so that further training does not change it, entries besides tensors included."""
    copies: State = {}
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            copies[name] = value.detach().clone()
        else:
            copies[name] = copy.deepcopy(value)
    return copies


def differences(
    there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name of each setting that differs, with both values; None for a missing one."""
    for name in dict.fromkeys((*here, *there)):
        one = there.get(name)
        other = here.get(name)
        dotted = f"{prefix}{'.' if prefix and name else ''}{name}"
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(one, other, dotted)
        elif one != other:
            yield dotted, one, other


def entry_kinds(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return the shape and dtype of each entry, as text."""
    kinds = {}
    for name, value in state_dict.items():
        kinds[name] = "not a tensor"
        if isinstance(value, Tensor):
            kinds[name] = f"{tuple(value.shape)} {value.dtype}"
    return kinds
