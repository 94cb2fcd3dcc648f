# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training state on disk: written whole or not at all, read back only whole and where it belongs."""

import copy
import hashlib
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from pyro_radial.infer.training.sole_writer import new_file

__all__ = [
    "State",
    "check_data",
    "check_entries",
    "check_settings",
    "copied",
    "differences",
    "kinds",
    "load_checkpoint",
    "plain",
    "save_checkpoint",
]

FORMAT = 2
# At the end of a file, before the digest of all that comes before it; torch.load does not mind either.
SEAL = b"pyro_radial.sha256="
DIGEST_SIZE = hashlib.sha256().digest_size

State = dict[str, Any]


def save_checkpoint(path: Path, state: State, *, rehearsal: bool = False) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old one or the new one.

    :param Path path: the file; its folder is made if missing.
    :param state: tensors, numbers, NumPy's among them, text, and lists and dicts of these.
    :param bool rehearsal: only find out whether it can be done, and leave the file as it is.
    :raises ValueError: naming the file, if ``state`` holds anything else, which :func:`load_checkpoint` would refuse.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as (file, temporary):
        sealed = _Sealed(file)
        try:
            torch.save(plain({"format": FORMAT, **state}), cast(IO[bytes], sealed))
            sealed.close()
            file.flush()
            os.fsync(file.fileno())
            # Reads the structure alone, not the tensors.
            torch.load(str(temporary), map_location="cpu", weights_only=True, mmap=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise ValueError(
                f"checkpoint {path} must hold tensors and plain values alone, as get_extra_state of a module should "
                f"return, got something else: {error}"
            ) from error
        if not rehearsal:
            os.replace(temporary, path)


def load_checkpoint(path: Path, device: torch.device, needed: Iterable[str] = ()) -> State:
    """Read a checkpoint; nothing of it is used before the digest of all of it has been checked.

    :param Path path: the file.
    :param torch.device device: where the tensors go.
    :param needed: the names that it must have.
    :returns: what :func:`save_checkpoint` wrote.
    :raises ValueError: naming the file, if it is damaged or no checkpoint of this library.
    """
    content = memoryview(path.read_bytes())
    body, end = content[: -DIGEST_SIZE - len(SEAL)], content[-DIGEST_SIZE - len(SEAL) :]
    if end != SEAL + hashlib.sha256(body).digest():
        raise ValueError(f"checkpoint {path} is damaged or no checkpoint: its content does not fit its digest")
    state = torch.load(io.BytesIO(body), map_location=device, weights_only=True)
    if state.get("format") != FORMAT or not state.keys() >= {*needed}:
        raise ValueError(f"checkpoint {path} is not one that fit wrote, or from another version")
    return state


def plain(value: Any) -> Any:
    """With NumPy's numbers as Python's, which are the same and can be read back."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


class _Sealed:
    """A file to write to that ends with a digest of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.write(SEAL + self._digest.digest())


def copied(state_dict: Mapping[str, Any]) -> State:
    """A copy of a module's state that its training does not reach, entries that are no tensors included."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state_dict.items()
    }


def check_settings(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], within: str = "") -> None:
    """Refuse to resume under other settings.

    :param Path path: the file.
    :param saved: the settings there; those of a part of the run are a dict of their own.
    :param current: those here.
    :param str within: what the settings are of.
    :raises ValueError: naming the setting and both values.
    """
    for name, there, here in differences(saved, current, within):
        raise ValueError(
            f"checkpoint {path} was made with {name}={there!r}, this run has {name}={here!r}; "
            "use the same settings to resume, or another checkpoint file to start anew"
        )


def differences(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The settings that differ, by dotted names, with both values; None for one that is missing."""
    for name in dict.fromkeys((*here, *there)):
        one, other = there.get(name), here.get(name)
        called = f"{within}{'.' if within and name else ''}{name}"
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(one, other, called)
        elif one != other:
            yield called, one, other


def check_data(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], name: str) -> None:
    """As :func:`check_settings`, of the fingerprints of data; what only one of them knows counts for nothing."""
    both = saved.keys() & current.keys()
    check_settings(path, {k: saved[k] for k in both}, {k: current[k] for k in current if k in both}, name)


def check_entries(path: Path, role: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the state of something else: other names, or tensors of other shapes or dtypes.

    The values of entries that are no tensors are not compared, since training may change them.

    :raises ValueError: naming the first entries that differ, if the checkpoint is from another model or guide.
    """
    here, there = kinds(current), kinds(saved)
    if here != there:
        differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        listed = "; ".join(_difference(name, here.get(name), there.get(name)) for name in differing[:3])
        raise ValueError(f"checkpoint {path} is from another {role}: {len(differing)} entries differ ({listed})")


def _difference(name: str, here: Any, there: Any) -> str:
    """In terms of shapes, or of dtypes where the shapes agree."""
    if isinstance(here, tuple) and isinstance(there, tuple):
        here, there = (here[1], there[1]) if here[0] == there[0] else (here[0], there[0])
    else:
        here, there = (kind[0] if isinstance(kind, tuple) else kind for kind in (here, there))
    return f"{name}: here {here}, there {there}"


def kinds(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Of each entry its shape and dtype, or that it is no tensor."""
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else "no tensor"
        for name, value in state_dict.items()
    }
