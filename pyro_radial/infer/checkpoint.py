# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training state on disk: written whole or not at all, read back only where it belongs."""

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

FORMAT = 1

State = dict[str, Any]


def save_checkpoint(path: Path, state: State) -> None:
    """Write a checkpoint so that a kill at any moment leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load_checkpoint(path: Path, device: torch.device) -> State:
    """Read a checkpoint.

    :raises ValueError: naming the file, if it is damaged or no checkpoint of this library.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ValueError(f"checkpoint {path} is damaged or no checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path} is not one that fit wrote")
    return state


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


def load_module(path: Path, role: str, module: nn.Module, state: State) -> None:
    """Load a module's state.

    :raises ValueError: naming the first parameters that differ, if the checkpoint is from another model or guide.
    """
    own = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    saved = {name: tuple(value.shape) for name, value in state.items()}
    if own != saved:
        differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        listed = "; ".join(f"{name}: here {own.get(name)}, there {saved.get(name)}" for name in differing[:3])
        raise ValueError(f"checkpoint {path} is from another {role}: {len(differing)} entries differ ({listed})")
    module.load_state_dict(state)


def rng_state(device: torch.device) -> State:
    """The state of the random number generators that training on this device draws from."""
    state: State = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: State, device: torch.device) -> None:
    """Put the generators back to where :func:`rng_state` found them."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
