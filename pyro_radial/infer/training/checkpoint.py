# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The file that a run resumes from."""

import copy
import hashlib
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyro_radial._pyro.compat import tree_map_only

# A file ends with this mark and a digest of everything before it; torch.load ignores both.
MARK = b"pyro_radial.sha256="
DIGEST_SIZE = hashlib.sha256().digest_size
CPU = torch.device("cpu")

State = dict[str, Any]
Settings = dict[str, Any]


class Checkpoint:
    """Keep the state of a run in one file. A kill at any moment leaves the old file or the new one.

    Only one run at a time may write the file.

    :param path: the file.
    :param format: what writes the file, and the version of its entries.
    """

    def __init__(self, path: str | Path, format: str) -> None:
        self.path = Path(path)
        self.format = format
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ValueError(
                f"checkpoint must be a regular file, got {self.path}, a folder, link or pipe"
            )

    def save(self, state: State, *, dry_run: bool = False) -> None:
        """Replace the file in one step; a dry run only checks that the state can be written and read back."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.partial")
        try:
            buffer = io.BytesIO()
            torch.save(to_plain({"format": self.format, **state}), buffer)
            content = buffer.getbuffer()
            with temporary.open("wb") as file:
                file.write(content)
                file.write(MARK + hashlib.sha256(content).digest())
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

    def load(self, device: torch.device = CPU) -> State | None:
        """Return what :meth:`save` wrote, on a device, or None if there is no file.

        :raises ValueError: if the file is damaged, or of another format.
        """
        if not self.path.exists():
            return None
        content = memoryview(self.path.read_bytes())
        size = len(content) - DIGEST_SIZE - len(MARK)
        body = content[:size]
        if content[size:] != MARK + hashlib.sha256(body).digest():
            raise ValueError(
                f"checkpoint {self.path} is damaged or not a checkpoint: its digest does not match"
            )
        # Not every device is one that torch.load knows.
        state: State = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        if state.get("format") != self.format:
            raise ValueError(
                f"checkpoint {self.path} is not from this version of this function: its format is "
                f"{state.get('format')!r}, expected {self.format!r}"
            )
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), state)

    def check_settings(self, saved: Settings, current: Settings) -> None:
        """Raise a ValueError that names the first setting that differs from the file, with both values."""
        for name in dict.fromkeys((*current, *saved)):
            if saved.get(name) != current.get(name):
                raise ValueError(
                    f"checkpoint {self.path} was made with {name}={saved.get(name)!r}, this run has "
                    f"{name}={current.get(name)!r}; use the same settings to resume, or another checkpoint file to "
                    "start anew"
                )

    def check_entries(
        self, role: str, saved: Mapping[str, Any], current: Mapping[str, Any]
    ) -> None:
        """Raise a ValueError if names, shapes or dtypes of a state dict differ from those in the file."""
        saved_kinds = entry_kinds(saved)
        current_kinds = entry_kinds(current)
        differences = [
            f"{name}: here {current_kinds.get(name)}, there {saved_kinds.get(name)}"
            for name in sorted({*saved_kinds, *current_kinds})
            if saved_kinds.get(name) != current_kinds.get(name)
        ]
        if differences:
            raise ValueError(
                f"checkpoint {self.path} is from another {role}: {len(differences)} entries differ "
                f"({'; '.join(differences[:3])})"
            )


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


def stateful_attributes(loss: object) -> dict[str, Any]:
    """Return the attributes of a loss that may have a state, such as measurement points."""
    # Modules of a loss, such as a prior on functions, are not trained.
    return {
        name: value
        for name, value in getattr(loss, "__dict__", {}).items()
        if not isinstance(value, nn.Module)
    }


def plain_settings(settings: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return the settings that are numbers, strings, tuples or None, under names with a prefix."""
    plain: Settings = {
        f"{prefix}{name}": value
        for name, value in to_plain(dict(settings)).items()
        if value is None or isinstance(value, int | float | str | tuple)
    }
    return plain


def entry_kinds(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """Return the shape and dtype of each entry, as text."""
    kinds = {}
    for name, value in state_dict.items():
        kinds[name] = "not a tensor"
        if isinstance(value, Tensor):
            kinds[name] = f"{tuple(value.shape)} {value.dtype}"
    return kinds
