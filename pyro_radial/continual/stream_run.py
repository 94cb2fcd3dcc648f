# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One run over a stream of tasks, stage by stage, with everything that a checkpoint of it must hold."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from torch import nn

from pyro_radial._state import load_states, states
from pyro_radial.continual.coresets import Coreset, split_coreset
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.checkpoint import (
    check_data,
    check_entries,
    check_settings,
    copied,
    load_checkpoint,
    save_checkpoint,
)
from pyro_radial.infer.data import Rows, device_of, num_rows
from pyro_radial.infer.data_fingerprint import data_fingerprint
from pyro_radial.infer.fingerprint import described
from pyro_radial.infer.fit import fit
from pyro_radial.infer.predict import predict
from pyro_radial.nn.bayesian_module import submodules
from pyro_radial.nn.multi_head import MultiHead, use_head
from pyro_radial.uncertainty.metrics import accuracy

__all__ = ["StreamRun"]

# Of the stages of one task, so that each has its own random numbers and can be run again alone.
TRAINING, CORESET, PREDICTION = 0, 1, 2

SAVED = ("settings", "done", "values", "baseline", "chain", "model", "described", "data", "parts")


@dataclass(frozen=True, eq=False)
class StreamRun:
    """One run over a stream; what is learned is in the chain."""

    chain: PriorChain
    stream: TaskStream
    guide: Callable[[PriorChain], Any]
    coreset: Coreset | None
    measure_on: str
    num_samples: int
    seed: int
    fit_options: Mapping[str, Any]
    #: The kept rows of each task, since a task may be costly to build and its rows to choose.
    kept: dict[int, Pair] = field(default_factory=dict)
    #: Those of the data of each task that was asked for.
    fingerprints: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def learn(self, number: int, checkpoint: Path | None) -> None:
        """Train on one task; its posterior is the prior from then on."""
        task = self.stream[number]
        rest = task.train if self.coreset is None else self._choose(number)
        self._measured(task)
        if checkpoint is not None:
            self._fingerprints(number)  # While the task is at hand.
        guide = self._train(task, rest, number, TRAINING, {**self.fit_options, "checkpoint": checkpoint})
        self.chain.advance(guide)

    def measure(self, learned: int, numbers: range) -> list[float]:
        """The accuracies on these tasks after learning the task of number ``learned`` (-1: none)."""
        if self.coreset is not None and learned >= 0 and self.stream.num_heads == 1:
            kept = [self._kept(number) for number in range(learned + 1)]
            union = torch.cat([x for x, _ in kept]), torch.cat([y for _, y in kept])
            with self._refined(union, learned, learned) as guide:
                return [self._accuracy(guide, learned, number) for number in numbers]
        result = []
        for number in numbers:
            refines = self.coreset is not None and number <= learned
            with self._refined(self._kept(number), learned, number) if refines else nullcontext(_nothing) as g:
                result.append(self._accuracy(g, learned, number))
        return result

    def _accuracy(self, guide: Callable[..., Any], learned: int, number: int) -> float:
        task = self.stream[number]
        x, y = self._measured(task)
        self._use(task)
        self._seed(learned, PREDICTION, number)
        # What the guide leaves out is drawn from the model's prior, which is the chain's posterior.
        mean = predict(self.chain, guide, x, self.num_samples).mean
        return float(accuracy(mean, y.to(mean.device)))

    def _measured(self, task: Task) -> Pair:
        data = getattr(task, self.measure_on)
        if data is None:
            raise ValueError(
                f"learn_stream: task {task.name!r} must have {self.measure_on} data to measure on, got none"
            )
        return data

    @contextmanager
    def _refined(self, kept: Pair, learned: int, number: int) -> Iterator[Any]:
        """A guide trained on kept rows with the head of this task; then the chain is as it was."""
        assert self.coreset is not None
        before = copied(self.chain.state_dict())
        num_data = self.chain.likelihood.num_data
        options = {**self.fit_options, **self.coreset.fit_options}
        try:
            yield self._train(self.stream[number], kept, learned, CORESET, options, number)
        finally:
            self.chain.load_state_dict(before)
            if num_data is not None:
                self.chain.likelihood.train_on(num_data, "learn_stream")

    def _train(self, task: Task, data: Pair, number: int, stage: int, options: Mapping[str, Any], part: int = 0) -> Any:
        self._use(task)
        self.chain.likelihood.train_on(num_rows(data[0]), f"learn_stream: task {task.name!r}")
        seed = self._seed(number, stage, part)
        guide = self.guide(self.chain)
        fit(self.chain, guide, data, seed=seed, progress=False, **options)
        return guide

    def _use(self, task: Task) -> None:
        if task.head or any(isinstance(module, MultiHead) for module in submodules(self.chain)):
            try:
                use_head(self.chain, task.head)
            except ValueError as error:
                raise ValueError(f"learn_stream: task {task.name!r} uses head {task.head}, but {error}") from error

    def _kept(self, number: int) -> Pair:
        if number not in self.kept:
            self._choose(number)
        return self.kept[number]

    def _choose(self, number: int) -> Pair:
        """Choose the rows of a task to keep; returns the others."""
        assert self.coreset is not None
        task = self.stream[number]
        if self.coreset.size >= num_rows(task.train[0]):
            raise ValueError(
                f"learn_stream: the size of coreset must be less than the {num_rows(task.train[0])} rows of task "
                f"{task.name!r}, got {self.coreset.size}"
            )
        index = self.coreset.choose(task.train[0], self.coreset.size, seed=self.seed)
        self.kept[number], rest = split_coreset(task.train, index)
        return rest

    def _seed(self, number: int, stage: int, part: int) -> int:
        """Seed the random numbers of one stage of one task, whatever was done before it."""
        seed = int(np.random.SeedSequence([self.seed, number + 1, stage, part]).generate_state(1)[0])
        pyro.set_rng_seed(seed)
        return seed

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must have been made with."""
        coreset = self.coreset
        return {
            "form": self.chain.form,
            "tasks": list(self.stream.names),
            "guide": described(self.guide),
            "coreset": None if coreset is None else {"size": coreset.size, "choose": described(coreset.choose)},
            "coreset_fit_options": None if coreset is None else _described_options(coreset.fit_options),
            "measure_on": self.measure_on,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "fit_options": _described_options(self.fit_options),
        }

    def save(self, path: Path, settings: dict[str, Any], done: int, matrix: AccuracyMatrix) -> None:
        """Write what the rest of the run depends on into a folder."""
        state = {"values": matrix.values, "baseline": matrix.baseline, "chain": self.chain.state_dict()}
        state["model"], state["described"] = self.chain.model_state(), described(self.chain.model)
        state["data"] = {task: self._fingerprints(number) for number, task in enumerate(self.stream.names[:done])}
        state["parts"] = states(self._parts)
        save_checkpoint(path / "stream.pt", {"settings": settings, "done": done, **state})
        # Of the task just learned, and in a new run of one that is not to be resumed.
        self._remove_tasks(path, len(self.stream))

    def load(self, path: Path, settings: dict[str, Any]) -> tuple[int, AccuracyMatrix]:
        """Go on from a folder: the number of tasks done and their accuracies."""
        file = path / "stream.pt"
        state = load_checkpoint(file, device_of(self.chain), needed=SAVED)
        check_settings(file, state["settings"], settings)
        check_entries(file, "model", self.chain.model_state(), state["model"])
        check_settings(file, state["described"], described(self.chain.model), "model")
        for number, task in enumerate(self.stream.names[: state["done"]]):
            for name, known in self._fingerprints(number).items():
                check_data(file, state["data"][task][name], known, f"{task}.{name}")
        load_states(self._parts, state["parts"])
        self.chain.load_state_dict(state["chain"])
        # A kill just after the last save may have left one.
        self._remove_tasks(path, state["done"])
        baseline = state["baseline"]
        return state["done"], AccuracyMatrix(
            state["values"].cpu(), self.stream.names, None if baseline is None else baseline.cpu()
        )

    @property
    def _parts(self) -> dict[str, Any]:
        """What the loss keeps from task to task, such as measurement points."""
        parts = vars(self.fit_options["loss"]) if "loss" in self.fit_options else {}
        return {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}

    def _fingerprints(self, number: int) -> dict[str, dict[str, Any]]:
        """Which data a task has, to learn from and to measure on."""
        if number not in self.fingerprints:
            task = self.stream[number]
            pairs = {"train": task.train, self.measure_on: self._measured(task)}
            device = device_of(self.chain)
            self.fingerprints[number] = {name: data_fingerprint(Rows(p, name), device) for name, p in pairs.items()}
        return self.fingerprints[number]

    def _remove_tasks(self, path: Path, number_of_tasks: int) -> None:
        for number in range(number_of_tasks):
            (path / f"task-{number}.pt").unlink(missing_ok=True)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A guide without sites."""


def _described_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in a form that can be saved and compared; a callback only watches, so its name is enough."""
    return {
        name: getattr(value, "__qualname__", type(value).__qualname__) if name == "callback" else described(value)
        for name, value in sorted(options.items())
    }
