# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The random number generators that training draws from: their state, and numbers from a seed beside them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_radial._pyro.one_at_a_time import one_at_a_time

__all__ = ["TorchNoise", "noise_of", "rng_state", "seeded", "seeded_elsewhere", "set_rng_state"]


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of torch's generators for a device, of Python's and of NumPy's."""
    # The latter two serve a Dataset that augments its items.
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    numpy_state = (kind, np.asarray(words).tolist(), *rest)
    state = {"cpu": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy_state}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where :func:`rng_state` found them."""
    torch.set_rng_state(state["cpu"].cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def noise_of(seed: int, process: int) -> int:
    """The seed of the noise of one of several processes that train together from one seed."""
    return int(np.random.SeedSequence([seed, process]).generate_state(1)[0])


class TorchNoise(NamedTuple):
    """The state of torch's generators alone, cheap enough to take at each step."""

    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> "TorchNoise":
        """The state as it is."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])

    def restore(self) -> None:
        """Put the generators back to it."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's random numbers from a seed, and its generators as they were afterwards; other threads wait."""
    with one_at_a_time(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        # For the generators of this device alone: a seed for all takes longer, and would move those of other devices.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def seeded_elsewhere(seed: int) -> Iterator[None]:
    """Python's and NumPy's random numbers from a seed, and their generators as they were afterwards; torch's go on."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
