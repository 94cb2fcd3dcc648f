# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training on a stream of tasks, each with the last posterior as its prior."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import (
    check_flag,
    check_types,
    load_states,
    optional,
    path_of,
    positive_count,
    random_seed,
    states,
)
from pyro_radial.continual.coresets import Coreset, choose, keep
from pyro_radial.continual.function_memory import FunctionChainELBO, FunctionMemory
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.autoguide import AutoRadial
from pyro_radial.infer.data import Rows, num_rows
from pyro_radial.infer.elbo import TermsELBO
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.training.checkpoint import Checkpoint, copy_state
from pyro_radial.infer.training.compared_settings import (
    data_settings,
    describe_setting,
    likelihood_settings,
)
from pyro_radial.infer.training.fit import fit
from pyro_radial.nn.bayesian_module import BayesianModule, submodules
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.multi_head import MultiHead, use_head
from pyro_radial.uncertainty.metrics import accuracy

PARTS = ("test", "validation")
# The stream decides these options of fit.
RESERVED = ("num_data", "seed", "checkpoint", "progress", "validation")
# Stages of one task. Each has its own random numbers, so it can be run again alone.
TRAINING = 0
CORESET = 1
PREDICTION = 2
UNTRAINED = 3
SAVED = ("settings", "done", "values", "chain", "model", "described", "data", "parts")

#: Arguments of :func:`~pyro_radial.fit` by name.
FitOptions = Mapping[str, Any]


def train_stream(
    chain: PriorChain,
    stream: TaskStream,
    guide: Callable[[PriorChain], Any] | None = None,
    *,
    coreset: Coreset | None = None,
    first_task: FitOptions | None = None,
    after: AccuracyMatrix | None = None,
    measure_on: str = "test",
    forward_transfer: bool = False,
    num_samples: int = 64,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **fit_options: Any,
) -> AccuracyMatrix:
    """Train on the tasks of a stream in turn, and after each task measure the accuracy on all tasks so far.

    For each task :func:`~pyro_radial.fit` trains a guide of the chain, whose posterior becomes the chain's prior and
    makes the predictions. With several heads (:class:`~pyro_radial.nn.MultiHead`) each task uses its own; the others
    are not trained, unless functions under them are kept. The settings of measured runs are in
    :mod:`~pyro_radial.continual.recipes`.

    A stream can grow. To learn more tasks, call it again with the same chain and a stream that begins with the tasks
    learned so far: with the same ``checkpoint``, or else with the matrix of the last call as ``after``. Earlier tasks
    are only measured again. The result is bit for bit that of one call with all tasks. What a coreset keeps is part of
    the chain's ``state_dict()``.

    :param PriorChain chain: a chain around a :class:`~pyro_radial.SupervisedModel` of a classifier; at the end its
        prior is the last posterior. A likelihood made without ``num_data`` takes each task's.
    :param TaskStream stream: the tasks.
    :param guide: a function from the chain to a guide of it, called for each task; the default is
        ``lambda chain: chain.guide(AutoRadial)``.
    :param Coreset coreset: rows to keep, to train on or to hold functions at; none by default.
    :param Mapping first_task: options of :func:`~pyro_radial.fit` for the first task that differ from the others.
    :param AccuracyMatrix after: the matrix that an earlier call returned; its tasks begin the stream and are learned.
        A checkpoint that exists is used instead.
    :param str measure_on: "test" or "validation".
    :param bool forward_transfer: whether to measure each task before it is learned, too, for
        ``AccuracyMatrix.forward_transfer``; this takes two more predictions for each task.
    :param int num_samples: number of posterior draws for a prediction.
    :param int seed: seed of all random numbers here; create the model from a seed too.
    :param checkpoint: a folder. A killed run resumes from there when it is called again with the same model and
        settings, and ends bit for bit like an undisturbed one. A finished run goes on if the stream has more tasks.
    :param bool progress: whether to show progress.
    :param fit_options: options of :func:`~pyro_radial.fit`, such as ``epochs``, ``batch_size``, ``optim`` and ``loss``.
    :returns: the accuracies, ``values[i, j]`` on task j after learning task i.
    :raises ValueError: naming the argument or the task: a task without the part to measure on, a coreset as large as
        its task, a network without the task's head, inputs or classes, a coreset that keeps something else than the
        chain has, a stream that lacks a task learned before, or a checkpoint of another model or other settings.

    Example::

        >>> import torch
        >>> from functools import partial
        >>> from pyro_radial import BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> from pyro_radial.continual import Task, TaskStream
        >>> parts = {"a": torch.eye(4)[:2].repeat(25, 1), "b": torch.eye(4)[2:].repeat(25, 1)}
        >>> tasks = [Task(name, (x, x.argmax(-1)), (x, x.argmax(-1))) for name, x in parts.items()]
        >>> stream = TaskStream.of(tasks, num_outputs=4)
        >>> model = SupervisedModel(BayesianModule(torch.nn.Linear(4, 4)), likelihoods.Categorical())
        >>> chain = PriorChain(model)
        >>> options = {"epochs": 20, "batch_size": 50, "optim": partial(torch.optim.Adam, lr=0.1), "progress": False}
        >>> first = train_stream(chain, stream[:1], **options)
        >>> matrix = train_stream(chain, stream, after=first, **options)
        >>> matrix.values.shape
        torch.Size([2, 2])
    """
    first_task = {} if first_task is None else first_task
    _check_options(chain, measure_on, coreset, fit_options, first_task)
    positive_count("num_samples", num_samples)
    random_seed("seed", seed, bits=64)
    check_flag("forward_transfer", forward_transfer)
    check_flag("progress", progress)
    check_types(AccuracyMatrix | None, after=after)
    folder = optional(path_of, "checkpoint", checkpoint)
    guide = partial(PriorChain.guide, guide_type=AutoRadial) if guide is None else guide
    if not isinstance(stream, TaskStream):
        raise ValueError(
            f"stream must be a TaskStream, got {type(stream).__name__}; TaskStream.of(tasks, num_outputs=..., "
            "num_heads=...) makes one"
        )
    check_types(Callable, guide=guide)
    run = _StreamRun(
        chain,
        stream,
        guide,
        coreset,
        measure_on,
        num_samples,
        seed,
        fit_options,
        first_task,
        folder,
    )
    with run.file or nullcontext(), _unchanged_on_refusal(chain):
        done, matrix = run.begin(after)
        left = range(done, len(stream))
        for number in tqdm(
            left, desc="tasks", initial=done, total=len(stream), disable=not progress
        ):
            if forward_transfer and number:
                matrix = matrix.with_next(number, *run.accuracies_before(number))
            run.learn(number)
            matrix = matrix.with_row(number, run.accuracies(number, range(number + 1)))
            run.save(number + 1, matrix)
    return matrix


def _check_options(
    chain: object,
    measure_on: str,
    coreset: Coreset | None,
    fit_options: FitOptions,
    first_task: FitOptions,
) -> None:
    """Raise a ValueError for options that conflict with a stream."""
    if measure_on not in PARTS:
        raise ValueError(f"measure_on must be one of {PARTS}, got {measure_on!r}")
    if not isinstance(chain, PriorChain) or getattr(chain, "likelihood", None) is None:
        raise ValueError(
            f"chain must be a PriorChain around a SupervisedModel, got {type(chain).__name__}"
        )
    check_types(Mapping, first_task=first_task)
    check_types(Coreset | None, coreset=coreset)
    given = {"fit_options": fit_options, "first_task": first_task}
    if coreset is not None:
        given["fit_options of the coreset"] = coreset.fit_options
    for argument, options in given.items():
        held = [name for name in RESERVED if name in options]
        if getattr(options.get("options"), "num_data", None) is not None:
            held.append("num_data")
        if held:
            raise ValueError(f"{argument} must leave out what the stream decides, got {held}")
    loss = fit_options.get("loss")
    if coreset is None or coreset.use == "labels" or loss is None:
        return
    if type(loss) is not TermsELBO or callable(loss.kl_weight):
        what = type(loss).__name__
        if type(loss) is TermsELBO:
            what += " with a kl_weight that changes"
        raise ValueError(
            f"loss must be a TermsELBO with a constant kl_weight if the coreset keeps functions, got {what}"
        )


@dataclass(frozen=True, eq=False)
class _StreamRun:
    """One run over a stream, task by task. The chain holds what is learned."""

    chain: PriorChain
    stream: TaskStream
    guide: Callable[[PriorChain], Any]
    coreset: Coreset | None
    measure_on: str
    num_samples: int
    seed: int
    fit_options: FitOptions
    first_task: FitOptions
    folder: Path | None
    #: Hashes of the data of the tasks seen so far, by number.
    known_data: dict[int, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def file(self) -> Checkpoint | None:
        """The file of the whole run; the task in progress has a file of its own beside it."""
        return None if self.folder is None else Checkpoint(self.folder / "stream.pt")

    # Training.

    def learn(self, number: int) -> None:
        """Train on one task, and make its posterior the prior."""
        task = self.stream[number]
        kept = None
        rest = task.train
        if self.coreset is not None:
            kept, rest = keep(self.coreset, task, self.seed)
        self._measured(task)
        if self.folder is not None:
            self._data_of(number)  # While the task is in memory.
        options = {**self.fit_options, "checkpoint": self._task_file(number)}
        if number == 0:
            options.update(self.first_task)
        also: list[int] = []
        if self.coreset is not None and self.coreset.use == "functions" and number:
            options["loss"], heads = self._loss_with_functions(
                self.coreset, task, options.get("loss")
            )
            # The sites of these heads are trained too.
            also = [head for head in heads if head != task.head]
        self._check_network(task)
        self.chain.advance(self._train(task, rest, (number, TRAINING, 0), options, also))
        if kept is not None:
            self.chain.kept.append(kept.to(device_of(self.chain)))

    def _check_network(self, task: Task) -> None:
        """Raise a ValueError that names the task if the network cannot have its inputs or classes."""
        for part in dict.fromkeys(("train", self.measure_on)):
            x, y = getattr(task, part)
            f = self._predict(self.chain, _nothing, task, x[:1], 1).samples[0]
            try:
                self.chain.likelihood.check_target(f.expand(len(y), *f.shape[1:]), y.to(f.device))
            except ValueError as error:
                raise ValueError(f"task {task.name!r}: {part}: {error}") from error
        # Heads may differ in their numbers of outputs.
        if self.stream.num_heads == 1 and self.stream.num_outputs > f.shape[-1]:
            raise ValueError(
                f"task {task.name!r}: the network of chain must have the num_outputs of stream, "
                f"{self.stream.num_outputs}, got {f.shape[-1]}"
            )

    def _loss_with_functions(
        self, coreset: Coreset, task: Task, loss: TermsELBO | None
    ) -> tuple[FunctionChainELBO, list[int]]:
        """Make the loss that holds functions at kept inputs, and return it with the heads of these."""
        if loss is None:
            loss = TermsELBO()
        device = device_of(self.chain)
        if coreset.inputs == "kept":
            inputs = self.chain.kept.inputs_by_head(task)
        else:
            x = task.train[0]
            if num_rows(x) > coreset.size:
                x = choose(coreset, task, self.seed)[0]
            inputs = {int(kept.head): x for kept in self.chain.kept.tasks}
        memories: list[FunctionMemory] = []
        try:
            for head, x in inputs.items():
                capacity = _room(len(x), coreset.size)
                memory = FunctionMemory.of(self.chain, x.to(device), head, capacity=capacity)
                memories.append(memory)
        except ValueError as error:
            raise ValueError(
                f"coreset must have functions to keep before task {task.name!r}, but {error}"
            ) from error
        holding = FunctionChainELBO(
            memories,
            loss.num_particles,
            kl_weight=coreset.weight,  # type: ignore[arg-type]
            weight_space_kl=loss.weight_at(0),
            max_points=coreset.max_points,  # type: ignore[arg-type]
            vectorize_particles=loss.vectorize_particles,
            strict_kl=loss.strict_kl,
        )
        return holding, list(inputs)

    def _train(
        self,
        task: Task,
        data: Pair,
        stage: tuple[int, ...],
        options: FitOptions,
        also: Sequence[int] = (),
    ) -> Any:
        """Train a guide on data of a task, with random numbers of this stage, and with other heads besides."""
        self._use_head(task, also)
        try:
            self.chain.likelihood.train_on(num_rows(data[0]))
        except ValueError as error:
            raise ValueError(f"task {task.name!r}: {error}") from error
        seed = self._set_seed(*stage)
        guide = self.guide(self.chain)
        fit(self.chain, guide, data, seed=seed, progress=False, **options)
        return guide

    def _use_head(self, task: Task, also: Sequence[int] = ()) -> None:
        """Let the network use the head of a task; a ValueError names the task if there is no such head."""
        if task.head or any(isinstance(module, MultiHead) for module in submodules(self.chain)):
            try:
                use_head(self.chain, task.head, also=also)
            except ValueError as error:
                raise ValueError(
                    f"task {task.name!r} uses head {task.head}, but {error}"
                ) from error

    def _set_seed(self, number: int, stage: int, part: int) -> int:
        """Seed the random numbers of one stage of one task, independent of what was done before."""
        seed = int(
            np.random.SeedSequence([self.seed, number + 1, stage, part]).generate_state(1)[0]
        )
        pyro.set_rng_seed(seed)
        return seed

    # Measuring.

    def accuracies(self, learned: int, numbers: Sequence[int]) -> list[float]:
        """Measure the accuracies on tasks after learning the task of number ``learned``."""
        if self.coreset is None or self.coreset.use == "functions":
            return [self._accuracy(_nothing, learned, number) for number in numbers]
        if self.stream.num_heads == 1:
            with self._refine(slice(learned + 1), learned, learned) as guide:
                return [self._accuracy(guide, learned, number) for number in numbers]
        result = []
        for number in numbers:
            if number > learned:  # Nothing of this task is kept yet.
                result.append(self._accuracy(_nothing, learned, number))
                continue
            with self._refine(slice(number, number + 1), learned, number) as guide:
                result.append(self._accuracy(guide, learned, number))
        return result

    def accuracies_before(self, number: int) -> tuple[float, float]:
        """Measure the accuracies on the task of this number before it is learned: the chain's, and without training."""
        self._check_network(self.stream[number])
        (before,) = self.accuracies(number - 1, [number])
        return before, self._accuracy(_nothing, number - 1, number, UNTRAINED)

    @contextmanager
    def _refine(self, tasks: slice, learned: int, number: int) -> Iterator[Any]:
        """Train a guide on the kept rows of tasks with the head of this task, and restore the chain afterwards."""
        assert self.coreset is not None
        kept = self.chain.kept.labeled(tasks)
        before = copy_state(self.chain.state_dict())
        num_data = self.chain.likelihood.num_data
        options = {**self.fit_options, **self.coreset.fit_options}
        try:
            yield self._train(self.stream[number], kept, (learned, CORESET, number), options)
        finally:
            self.chain.load_state_dict(before)
            if num_data is not None:
                self.chain.likelihood.train_on(num_data)

    def _accuracy(
        self,
        guide: Callable[..., object],
        learned: int,
        number: int,
        stage: int = PREDICTION,
    ) -> float:
        """Measure the accuracy of a guide on a task after learning ``learned``, with the random numbers of a stage."""
        task = self.stream[number]
        x, y = self._measured(task)
        self._set_seed(learned, stage, number)
        # Sites that the guide does not have are drawn from the model's prior, which is the chain's posterior.
        model = self.chain.model if stage == UNTRAINED else self.chain
        mean = self._predict(model, guide, task, x, self.num_samples).mean
        return float(accuracy(mean, y.to(mean.device)))

    def _predict(
        self,
        model: Callable[..., object],
        guide: Callable[..., object],
        task: Task,
        x: Tensor,
        num_samples: int,
    ) -> Prediction:
        """Predict inputs of a task with its head."""
        self._use_head(task)
        try:
            return predict(model, guide, x, num_samples)
        except ValueError as error:
            raise ValueError(f"task {task.name!r} cannot be predicted: {error}") from error

    def _measured(self, task: Task) -> Pair:
        """Return the rows of a task to measure on."""
        data = getattr(task, self.measure_on)
        if data is None:
            raise ValueError(
                f"task {task.name!r} must have {self.measure_on} data to measure on, got none"
            )
        return data

    # Resuming.

    def begin(self, after: AccuracyMatrix | None) -> tuple[int, AccuracyMatrix]:
        """Return the number of tasks done and their accuracies: of the checkpoint, if there is one, or ``after``."""
        if self.file is not None:
            state = self.file.load(device_of(self.chain), needed=SAVED)
            if state is not None:
                return self._resume(self.file, state)
        done = 0
        matrix = AccuracyMatrix.empty(self.stream.names)
        if after is not None:
            self._check_after(after)
            done = len(after.names)
            matrix = after.with_more_tasks(self.stream.names)
        self.chain.kept.check(self.coreset, self.stream.names[:done])
        # With the chain before the first task to learn, to begin it again.
        self.save(done, matrix)
        return done, matrix

    def _check_after(self, after: AccuracyMatrix) -> None:
        """Raise a ValueError unless the stream begins with tasks that the chain has learned."""
        given = dict(enumerate(self.stream.names))
        for number, name in enumerate(after.names):
            if given.get(number) != name:
                raise ValueError(
                    f"stream must begin with the tasks of after: task {number} must be {name!r}, got "
                    f"{given.get(number)!r}"
                )
        if bool(after.values[-1].isnan().any()):
            raise ValueError(
                f"after must have all accuracies after its last task, {after.names[-1]!r}, got NaN"
            )
        if not self.chain.prior:
            raise ValueError(
                "chain must have learned the tasks of after, got a chain that has learned nothing"
            )

    def save(self, done: int, matrix: AccuracyMatrix) -> None:
        """Write everything that the rest of the run depends on."""
        if self.file is None:
            return
        names = self.stream.names[:done]
        self.file.save(
            {
                "settings": self._settings(),
                "done": done,
                "values": matrix.values,
                "baseline": matrix.baseline,
                "chain": self.chain.state_dict(),
                "model": self.chain.model_state(),
                "described": _describe_model(self.chain.model),
                "data": {task: self._data_of(number) for number, task in enumerate(names)},
                "parts": states(self._loss_parts()),
            }
        )
        # The files of the task just learned, and of an earlier run that is not resumed.
        self._remove_task_files(len(self.stream))

    def _resume(self, file: Checkpoint, state: Mapping[str, Any]) -> tuple[int, AccuracyMatrix]:
        """Check and load what a checkpoint holds, and return the number of tasks done and their accuracies."""
        settings = self._settings()
        tasks = state["settings"].get("tasks", [])
        # Further tasks may follow.
        settings["tasks"] = settings["tasks"][: len(tasks)]
        file.check(state["settings"], settings)
        file.check_entries("model", state["model"], self.chain.model_state())
        file.check(state["described"], _describe_model(self.chain.model), "model")
        done = state["done"]
        for number, task in enumerate(self.stream.names[:done]):
            for part, known in self._data_of(number).items():
                file.check(state["data"][task][part], known, f"{task}.{part}")
        load_states(self._loss_parts(), state["parts"])
        self.chain.load_state_dict(state["chain"])
        self.chain.kept.check(self.coreset, self.stream.names[:done])
        # A kill just after the last save may have left one.
        self._remove_task_files(done)
        matrix = AccuracyMatrix(state["values"], tuple(tasks), state.get("baseline"))
        return done, matrix.with_more_tasks(self.stream.names)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must have been made with."""
        coreset = {} if self.coreset is None else {**vars(self.coreset)}
        return {
            "form": self.chain.form,
            "weight": self.chain.weight,
            "tasks": list(self.stream.names),
            "guide": describe_setting(self.guide),
            "measure_on": self.measure_on,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "coreset_fit_options": _describe_options(coreset.pop("fit_options", {})),
            "coreset": _describe_options(coreset),
            "fit_options": _describe_options(self.fit_options),
            "first_task": _describe_options(self.first_task),
        }

    def _loss_parts(self) -> dict[str, Any]:
        """Return parts of the loss with a state from task to task, such as measurement points."""
        parts = dict(getattr(self.fit_options.get("loss"), "__dict__", {}))
        callback = self.fit_options.get("callback")
        parts["callback"] = getattr(callback, "__self__", callback)
        return {name: part for name, part in parts.items() if not isinstance(part, nn.Module)}

    def _data_of(self, number: int) -> dict[str, Any]:
        """Return the hashes of the data that a task is trained and measured on."""
        if number not in self.known_data:
            task = self.stream[number]
            measured = Rows(self._measured(task), self.measure_on)
            self.known_data[number] = {
                "train": data_settings(Rows(task.train, "train")),
                self.measure_on: data_settings(measured),
            }
        return self.known_data[number]

    def _task_file(self, number: int) -> Path | None:
        return None if self.folder is None else self.folder / f"task-{number}.pt"

    def _remove_task_files(self, number_of_tasks: int) -> None:
        for number in range(number_of_tasks):
            file = self._task_file(number)
            if file is not None:
                file.unlink(missing_ok=True)


@contextmanager
def _unchanged_on_refusal(chain: PriorChain) -> Iterator[None]:
    """Restore the chain if a task is refused."""
    before = copy_state(chain.state_dict())
    try:
        yield
    except ValueError:
        chain.load_state_dict(before)
        raise


def _room(rows: int, size: int) -> int:
    """Return the number of rows to reserve, those of 1, 2, 4, ... tasks, so that a graph serves several tasks."""
    room = size
    while room < rows:
        room *= 2
    return room


def _nothing(*args: object, **kwargs: object) -> None:
    """Return a guide without sites."""


def _describe_model(model: object) -> dict[str, Any]:
    """Describe the likelihoods and the networks' priors, which a chain replaces site by site."""
    priors = [
        describe_setting(part.prior)
        for part in submodules(model)
        if isinstance(part, BayesianModule)
    ]
    return {
        **likelihood_settings(model),
        "prior": priors[0] if len(priors) == 1 else describe_setting(priors),
    }


def _describe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Describe settings so that they can be saved and compared. A callback only watches, so its name is enough."""
    found: dict[str, Any] = {}
    for name, value in sorted(options.items()):
        if name == "callback":
            found[name] = getattr(value, "__qualname__", type(value).__qualname__)
        else:
            found[name] = describe_setting(value)
    return found
