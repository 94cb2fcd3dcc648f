# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training state on disk: written whole or not at all, read back only where it belongs."""

import copy
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

__all__ = ["State", "check_entries", "check_settings", "copied", "load_checkpoint", "save_checkpoint"]

FORMAT = 1

State = dict[str, Any]


def save_checkpoint(path: Path, state: State) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old one or the new one.

    :param Path path: the file; its folder is made if missing.
    :param state: tensors, numbers, text, and lists and dicts of these.
    :raises ValueError: naming the file, if ``state`` holds anything else, which :func:`load_checkpoint` would refuse.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        # Reads the structure alone, not the tensors.
        torch.load(str(temporary), map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path} must hold tensors and plain values alone, as get_extra_state of a module should "
            f"return, got something else: {error}"
        ) from error
    os.replace(temporary, path)


def load_checkpoint(path: Path, device: torch.device) -> State:
    """Read a checkpoint.

    :param Path path: the file.
    :param torch.device device: where the tensors go.
    :returns: what :func:`save_checkpoint` wrote.
    :raises ValueError: naming the file, if it is damaged or no checkpoint of this library.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        state = torch.load(content, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError, BadZipFile) as error:
        raise ValueError(f"checkpoint {path} is damaged or no checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not one that fit wrote")
    return state


def copied(state_dict: Mapping[str, Any]) -> State:
    """A copy of a module's state that its training does not reach, entries that are no tensors included."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state_dict.items()
    }


def check_settings(path: Path, saved: State, current: State) -> None:
    """Refuse to resume under other settings.

    :raises ValueError: naming the setting and both values.
    """
    for name, value in current.items():
        if saved.get(name) != value:
            raise ValueError(
                f"checkpoint {path} was made with {name}={saved.get(name)!r}, this run has {name}={value!r}; "
                "use the same settings to resume, or another checkpoint file to start anew"
            )


def check_entries(path: Path, role: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the state of something else: other names, or tensors of other shapes.

    The values of entries that are no tensors are not compared, since training may change them.

    :raises ValueError: naming the first entries that differ, if the checkpoint is from another model or guide.
    """
    here, there = _shapes(current), _shapes(saved)
    if here != there:
        differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        listed = "; ".join(f"{name}: here {here.get(name)}, there {there.get(name)}" for name in differing[:3])
        raise ValueError(f"checkpoint {path} is from another {role}: {len(differing)} entries differ ({listed})")


def _shapes(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else "no tensor" for name, value in state_dict.items()
    }
