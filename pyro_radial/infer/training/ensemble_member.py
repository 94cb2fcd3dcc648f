# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One model of an ensemble and its guide, with random numbers and a parameter store of their own."""

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import nn

from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial._pyro.random_state import noise_of, seeded, seeded_elsewhere
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.training.checkpoint import State
from pyro_radial.infer.training.data import Rows, device_of, dtype_of, move, num_rows, take
from pyro_radial.infer.training.fit import FitResult, fit
from pyro_radial.infer.training.trained import Trained
from pyro_radial.nn.likelihood import set_num_data

__all__ = ["Make", "Member", "Outcome", "train_apart", "train_in_process"]

Make = Callable[[int], tuple[Callable[..., Any], nn.Module]]
#: What a training gave, with the state that it left, or why it gave nothing.
Outcome = tuple[FitResult, State] | Exception

# Rows that a guide is set up with.
FEW = 2
WATCH_SECONDS = 0.2


class Member:
    """A model and its guide, made from a seed.

    Names in Pyro's parameter store are those of classes, so that two of Pyro's own guides of one class would read each
    other's parameters: each member has a store of its own.

    :param make: from a seed to a model and its guide.
    :param int index: which member it is.
    :param int seed: the ensemble's.
    :raises ValueError: for what is no such pair.
    """

    def __init__(self, make: Make, index: int, seed: int) -> None:
        self.index, self.seed = index, noise_of(seed, index)
        self._store: Any = {"params": {}, "constraints": {}}
        with self._apart(self.seed, torch.get_default_device()):
            made = make(self.seed)
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], nn.Module)):
            got = tuple(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
            raise ValueError(f"Ensemble: make must return a model and its guide, an nn.Module, got {got}")
        self.model, self.guide = made
        self._trained: Trained | None = None

    @contextmanager
    def _apart(self, seed: int, device: torch.device) -> Iterator[None]:
        """Within its own store, with random numbers from a seed, and those around as they were."""
        with self.in_own_store(), seeded(seed, device), seeded_elsewhere(seed):
            yield

    @contextmanager
    def in_own_store(self) -> Iterator[None]:
        """With the parameters of this member in Pyro's store, and no others."""
        with one_at_a_time(), pyro.get_param_store().scope(self._store):
            yield

    def set_up(self, x: Any, y: Any) -> None:
        """Make the parameters, by running both on some inputs and targets."""
        device = device_of(self.guide, self.model)
        with self._apart(noise_of(self.seed, 1), device):
            self._trained = Trained(self.model, self.guide, (move(x, device), move(y, device)))

    def set_up_for(self, data: Any, num_data: int | None) -> Any:
        """The same with the first rows of data to train on, whose number its likelihood takes; their inputs."""
        rows = Rows(data, "data", dtype_of(self.guide, self.model))
        set_num_data(self.model, num_data or len(rows), "Ensemble.fit")
        x, y = rows.take(torch.arange(min(FEW, len(rows))))
        self.set_up(x, y)
        return x

    def output_shape(self, x: Any, function_site: str) -> tuple[int, ...]:
        """The shape of the function's values at one input."""
        few = take(x, slice(0, min(FEW, num_rows(x))))
        with seeded(0, device_of(self.guide, self.model)):
            return tuple(self.predict(few, 1, FEW, function_site, progress=False).samples.shape[2:])

    def fit(self, data: Any, settings: dict[str, Any]) -> FitResult:
        """Train it; while it lasts other threads wait, since Pyro has one store for all of them."""
        with self._apart(self.seed, device_of(self.guide, self.model)):
            return fit(self.model, self.guide, data, seed=self.seed, progress=False, **settings)

    def predict(self, x: Any, num_samples: int, chunk_size: int, function_site: str, progress: bool) -> Prediction:
        """Draws of it."""
        with self.in_own_store():
            return predict(
                self.model, self.guide, x, num_samples, chunk_size, function_site=function_site, progress=progress
            )

    def state(self) -> State:
        """A copy of all that training changes."""
        with self.in_own_store():
            return self._with_parameters().copy_of_state()

    def load(self, state: State) -> None:
        """Put back what :meth:`state` returned.

        :raises ValueError: naming the entry, for the state of another model or guide.
        """
        with self.in_own_store():
            self._with_parameters().check(Path(f"of member {self.index}"), state)
            self._with_parameters().load(state)

    def _with_parameters(self) -> Trained:
        if self._trained is None:
            raise RuntimeError("Ensemble.setup: must be called first, with the arguments of the model")
        return self._trained


def train_apart(make: Make, index: int, seed: int, data: Any, settings: dict[str, Any]) -> Outcome:
    """Make and train one member, in this process or in one of its own.

    :returns: its result and its state, or why there are none.
    """
    try:
        member = Member(make, index, seed)
        member.set_up_for(data, settings.get("num_data"))
        return member.fit(data, settings), member.state()
    # Whatever it is belongs to this member; the others go on.
    except Exception as error:
        return _carried(error)


def train_in_process(parent: int, *job: Any) -> Outcome:
    """The same in a process that ends when the one that began it, of this id, is killed.

    It would otherwise go on with its member, and keep the checkpoint from whoever resumes.
    """
    # A thread of the very process, or a cluster's own process, has another parent.
    if os.getppid() == parent and parent not in _watched:
        _watched.add(parent)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return train_apart(*job)


_watched: set[int] = set()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def _carried(error: Exception) -> Exception:
    """The error with where it was, as something that another process can read."""
    note = "".join(traceback.format_exception(error))
    try:
        twin = pickle.loads(pickle.dumps(error))
    # Classes of others may need arguments that they do not keep, or be out of the other's reach.
    except Exception:
        twin = RuntimeError(f"{type(error).__name__}: {error}")
    twin.add_note(note)
    return twin
