# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One run over a stream of tasks, stage by stage, with everything that a checkpoint of it must hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyro
from torch import nn

from pyro_radial._pyro.checks import load_states, states
from pyro_radial.continual.coresets import Coreset
from pyro_radial.continual.function_memory import FunctionChainELBO
from pyro_radial.continual.kept_rows import KeptRows
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.training.checkpoint import (
    check_data,
    check_entries,
    check_settings,
    copied,
    load_checkpoint,
    save_checkpoint,
)
from pyro_radial.infer.training.data import Rows, device_of, num_rows
from pyro_radial.infer.training.fit import fit
from pyro_radial.infer.training.identity import data_identity, described
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
    #: Those of the first task, where they differ.
    first_task: Mapping[str, Any]
    #: Those of the data of each task that was asked for.
    fingerprints: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @cached_property
    def kept(self) -> KeptRows | None:
        """What is kept of each task."""
        return None if self.coreset is None else KeptRows(self.coreset, self.stream, self.seed)

    @property
    def _functions(self) -> KeptRows | None:
        """The same where it is used to hold functions."""
        return None if self.coreset is None or self.coreset.use == "labels" else self.kept

    @property
    def _labels(self) -> KeptRows | None:
        """The same where it is trained on before predictions."""
        return None if self.coreset is None or self.coreset.use == "functions" else self.kept

    def learn(self, number: int, checkpoint: Path | None) -> None:
        """Train on one task; its posterior is the prior from then on."""
        task = self.stream[number]
        rest = task.train if self.kept is None else self.kept.rest(number)
        self._measured(task)
        if checkpoint is not None:
            self._fingerprints(number)  # While the task is at hand.
        options = {**self.fit_options, **({} if number else self.first_task), "checkpoint": checkpoint}
        also: list[int] = []
        if self._functions is not None and number:
            options["loss"] = self._loss_with_functions(self._functions, number, options.get("loss"))
            # With sites, so that the guide trains them too.
            also = [head for head in self._functions.heads(range(number)) if head != task.head]
        guide = self._train(task, rest, number, TRAINING, options, also=also)
        self.chain.advance(guide)

    def _loss_with_functions(self, kept: KeptRows, number: int, loss: Any) -> FunctionChainELBO:
        """The loss of a later task, whose functions are held at what was kept."""
        loss = RadialELBO() if loss is None else loss
        kept.check_inputs(number)
        coreset = kept.coreset
        assert coreset.weight is not None
        assert coreset.max_points is not None
        return FunctionChainELBO(
            kept.functions(self.chain, number),
            loss.num_particles,
            kl_weight=coreset.weight,
            weight_space_kl=loss.kl_weight,
            max_points=coreset.max_points,
            vectorize_particles=loss.vectorize_particles,
            strict_kl=loss.strict_kl,
        )

    def measure(self, learned: int, numbers: range) -> list[float]:
        """The accuracies on these tasks after learning the task of number ``learned`` (-1: none)."""
        kept = self._labels if learned >= 0 else None
        if kept is not None and self.stream.num_heads == 1:
            with self._refined(kept.labeled(range(learned + 1)), learned, learned) as guide:
                return [self._accuracy(guide, learned, number) for number in numbers]
        result = []
        for number in numbers:
            own = kept.labeled(range(number, number + 1)) if kept is not None and number <= learned else None
            with nullcontext(_nothing) if own is None else self._refined(own, learned, number) as guide:
                result.append(self._accuracy(guide, learned, number))
        return result

    def _accuracy(self, guide: Callable[..., Any], learned: int, number: int) -> float:
        task = self.stream[number]
        x, y = self._measured(task)
        self._use(task)
        self._seed(learned, PREDICTION, number)
        # What the guide leaves out is drawn from the model's prior, which is the chain's posterior.
        try:
            mean = predict(self.chain, guide, x, self.num_samples).mean
        except ValueError as error:
            raise ValueError(f"train_stream: task {task.name!r} cannot be predicted: {error}") from error
        return float(accuracy(mean, y.to(mean.device)))

    def _measured(self, task: Task) -> Pair:
        data = getattr(task, self.measure_on)
        if data is None:
            raise ValueError(
                f"train_stream: task {task.name!r} must have {self.measure_on} data to measure on, got none"
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
                self.chain.likelihood.train_on(num_data, "train_stream")

    def _train(
        self,
        task: Task,
        data: Pair,
        number: int,
        stage: int,
        options: Mapping[str, Any],
        part: int = 0,
        also: Sequence[int] = (),
    ) -> Any:
        self._use(task, also)
        self.chain.likelihood.train_on(num_rows(data[0]), f"train_stream: task {task.name!r}")
        seed = self._seed(number, stage, part)
        guide = self.guide(self.chain)
        fit(self.chain, guide, data, seed=seed, progress=False, **options)
        return guide

    def _use(self, task: Task, also: Sequence[int] = ()) -> None:
        if task.head or any(isinstance(module, MultiHead) for module in submodules(self.chain)):
            try:
                use_head(self.chain, task.head, also=also)
            except ValueError as error:
                raise ValueError(f"train_stream: task {task.name!r} uses head {task.head}, but {error}") from error

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
            "coreset": None if coreset is None else _described_coreset(coreset),
            "coreset_fit_options": None if coreset is None else _described_options(coreset.fit_options),
            "measure_on": self.measure_on,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "fit_options": _described_options(self.fit_options),
            "first_task": _described_options(self.first_task),
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
            self.fingerprints[number] = {name: data_identity(Rows(p, name)) for name, p in pairs.items()}
        return self.fingerprints[number]

    def _remove_tasks(self, path: Path, number_of_tasks: int) -> None:
        for number in range(number_of_tasks):
            (path / f"task-{number}.pt").unlink(missing_ok=True)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A guide without sites."""


def _described_coreset(coreset: Coreset) -> dict[str, Any]:
    plain = {name: getattr(coreset, name) for name in ("size", "use", "weight", "max_points")}
    return {**plain, "choose": described(coreset.choose)}


def _described_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in a form that can be saved and compared; a callback only watches, so its name is enough."""
    return {
        name: getattr(value, "__qualname__", type(value).__qualname__) if name == "callback" else described(value)
        for name, value in sorted(options.items())
    }
