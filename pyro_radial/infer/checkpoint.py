# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training state on disk: written whole or not at all, read back only where it belongs."""

import io
import os
import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

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
    content = io.BytesIO(path.read_bytes())
    try:
        state = torch.load(content, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError, BadZipFile) as error:
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


def check_shapes(path: Path, role: str, current: Mapping[str, Tensor], saved_state: Mapping[str, Tensor]) -> None:
    """Refuse the tensors of something else.

    :raises ValueError: naming the first tensors that differ, if the checkpoint is from another model or guide.
    """
    own = {name: tuple(value.shape) for name, value in current.items()}
    saved = {name: tuple(value.shape) for name, value in saved_state.items()}
    if own != saved:
        differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
        listed = "; ".join(f"{name}: here {own.get(name)}, there {saved.get(name)}" for name in differing[:3])
        raise ValueError(f"checkpoint {path} is from another {role}: {len(differing)} entries differ ({listed})")


def rng_state(device: torch.device) -> State:
    """The state of the random number generators that training on this device draws from."""
    # Those of Python and NumPy serve a Dataset that augments its items.
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    numpy_state = (kind, np.asarray(words).tolist(), *rest)
    state: State = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: State, device: torch.device) -> None:
    """Put the generators back to where :func:`rng_state` found them."""
    torch.set_rng_state(state["cpu"].cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers from a seed, and its generators as they were afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
