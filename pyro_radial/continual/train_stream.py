# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training on a stream of tasks, each with the last posterior as its prior."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import (
    check_choice,
    load_states,
    positive_count,
    prefix_errors,
    random_seed,
    states,
    warn,
)
from pyro_radial.continual.coresets import Coreset, store_coreset
from pyro_radial.continual.function_memory import remember_functions
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.prior_chain import PriorChain, model_entries
from pyro_radial.continual.streams import Pair, Task, TaskStream
from pyro_radial.infer.autoguide import AutoRadial
from pyro_radial.infer.data import num_rows
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.training.checkpoint import (
    Checkpoint,
    Settings,
    State,
    copy_state,
    plain_settings,
    stateful_attributes,
)
from pyro_radial.infer.training.fit import DEFAULT_BATCH_SIZE, fit
from pyro_radial.nn.bayesian_module import submodules
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.multi_head import MultiHead, use_head
from pyro_radial.uncertainty.metrics import accuracy

# The stream decides these options of fit.
RESERVED = ("num_data", "seed", "checkpoint", "progress", "validation")
# Stages of one task. Each has its own random numbers, so it can be run again alone.
TRAINING = 0
CORESET = 1
PREDICTION = 2
UNTRAINED = 3

# The smallest batch that the number of steps decides.
SMALLEST_BATCH = 32

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
    fewest_steps: int | None = None,
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
    :param int fewest_steps: steps that a task takes at least: ``batch_size`` is halved for a task with fewer, but not
        below 32 rows. A warning names a task that still has fewer.
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
        >>> inputs = {"a": torch.eye(4)[:2].repeat(25, 1), "b": torch.eye(4)[2:].repeat(25, 1)}
        >>> tasks = [Task(name, (x, x.argmax(-1)), (x, x.argmax(-1))) for name, x in inputs.items()]
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
    if fewest_steps is not None:
        positive_count("fewest_steps", fewest_steps)
    random_seed("seed", seed, bits=64)
    if not isinstance(stream, TaskStream):
        raise ValueError(
            f"stream must be a TaskStream, got {type(stream).__name__}; TaskStream.of(tasks, num_outputs=..., "
            "num_heads=...) makes one"
        )
    training = _StreamTraining(
        chain,
        stream,
        partial(PriorChain.guide, guide_type=AutoRadial) if guide is None else guide,
        coreset,
        measure_on,
        num_samples,
        fewest_steps,
        seed,
        fit_options,
        first_task,
        None
        if checkpoint is None
        else Checkpoint(Path(checkpoint) / "stream.pt", "train_stream 5"),
    )
    state = copy_state(chain.state_dict())
    try:
        matrix = training.begin(after)
        num_learned = len(matrix.names)
        for number in tqdm(
            range(num_learned, len(stream)),
            desc="tasks",
            initial=num_learned,
            total=len(stream),
            disable=not progress,
        ):
            matrix = matrix.with_more_tasks(stream.names[: number + 1])
            if forward_transfer and number:
                matrix = matrix.with_next(number, *training.accuracies_before_learning(number))
            training.learn(number)
            matrix = matrix.with_row(number, training.accuracies(number, range(number + 1)))
            training.save(matrix)
    except ValueError:
        # A refused task leaves the chain as it was.
        chain.load_state_dict(state)
        raise
    return matrix


def _check_options(
    chain: object,
    measure_on: str,
    coreset: Coreset | None,
    fit_options: FitOptions,
    first_task: FitOptions,
) -> None:
    """Raise a ValueError for options that conflict with a stream."""
    check_choice("measure_on", measure_on, ("test", "validation"))
    if not isinstance(chain, PriorChain) or getattr(chain, "likelihood", None) is None:
        raise ValueError(
            f"chain must be a PriorChain around a SupervisedModel, got {type(chain).__name__}"
        )
    options_by_argument = {"fit_options": fit_options, "first_task": first_task}
    if coreset is not None:
        options_by_argument["fit_options of the coreset"] = coreset.fit_options
    for argument, options in options_by_argument.items():
        reserved = [name for name in RESERVED if name in options]
        if getattr(options.get("options"), "num_data", None) is not None:
            reserved.append("num_data")
        if reserved:
            raise ValueError(f"{argument} must leave out what the stream decides, got {reserved}")
    loss = fit_options.get("loss")
    if coreset is None or coreset.use == "labels" or loss is None:
        return
    if type(loss) is not TermsELBO or callable(loss.kl_weight):
        raise ValueError(
            "loss must be a TermsELBO with a constant kl_weight if the coreset keeps functions, got "
            f"{type(loss).__name__} with kl_weight={getattr(loss, 'kl_weight', None)!r}"
        )


@dataclass(frozen=True, eq=False)
class _StreamTraining:
    """One run over a stream, task by task. The chain holds what is learned."""

    chain: PriorChain
    stream: TaskStream
    guide: Callable[[PriorChain], Any]
    coreset: Coreset | None
    measure_on: str
    num_samples: int
    fewest_steps: int | None
    seed: int
    fit_options: FitOptions
    first_task: FitOptions
    #: The file of the chain and the accuracies; fit keeps the task in training in a file beside it.
    file: Checkpoint | None

    # Training.

    def learn(self, number: int) -> None:
        """Train on one task, and make its posterior the prior."""
        task = self.stream[number]
        stored = None
        rows = task.train
        if self.coreset is not None:
            stored, rows = store_coreset(self.coreset, task, self.seed)
        self._measured(task)
        options = {**self.fit_options}
        if self.file is not None:
            options["checkpoint"] = self.file.path.with_name(f"task-{number}.pt")
        if number == 0:
            options.update(self.first_task)
        if self.fewest_steps is not None:
            options["batch_size"] = _batch_size(
                task.name, num_rows(rows[0]), self.fewest_steps, **options
            )
        other_heads: list[int] = []
        if self.coreset is not None and self.coreset.use == "functions" and number:
            loss = remember_functions(
                self.chain, self.coreset, task, options.get("loss") or TermsELBO(), self.seed
            )
            options["loss"] = loss
            # The sites of these heads are trained too.
            other_heads = [memory.head for memory in loss.memories if memory.head != task.head]
        self._check_network(task)
        self.chain.advance(self._train(task, rows, (number, TRAINING, 0), options, other_heads))
        if stored is not None:
            self.chain.coresets.append(stored.to(device_of(self.chain)))

    def _check_network(self, task: Task) -> None:
        """Raise a ValueError that names the task if the network cannot have its inputs or classes."""
        for role in dict.fromkeys(("train", self.measure_on)):
            x, y = getattr(task, role)
            f = self._predict(self.chain, _guide_without_sites, task, x[:1], 1).samples[0]
            with prefix_errors(f"task {task.name!r}: {role}"):
                self.chain.likelihood.read_target(f.expand(len(y), *f.shape[1:]), y.to(f.device))
        # Heads may differ in their numbers of outputs.
        if self.stream.num_heads == 1 and self.stream.num_outputs > f.shape[-1]:
            raise ValueError(
                f"task {task.name!r}: the network of chain must have the num_outputs of stream, "
                f"{self.stream.num_outputs}, got {f.shape[-1]}"
            )

    def _train(
        self,
        task: Task,
        rows: Pair,
        stage: tuple[int, ...],
        options: FitOptions,
        other_heads: Sequence[int] = (),
    ) -> Any:
        """Train a guide on rows of a task, with random numbers of this stage, and with other heads besides."""
        self._use_head(task, other_heads)
        with prefix_errors(f"task {task.name!r}"):
            self.chain.likelihood.train_on(num_rows(rows[0]))
        seed = self._set_seed(*stage)
        guide = self.guide(self.chain)
        fit(self.chain, guide, rows, seed=seed, progress=False, **options)
        return guide

    def _use_head(self, task: Task, other_heads: Sequence[int] = ()) -> None:
        """Let the network use the head of a task; a ValueError names the task if there is no such head."""
        if task.head or any(isinstance(module, MultiHead) for module in submodules(self.chain)):
            with prefix_errors(f"task {task.name!r} uses head {task.head}"):
                use_head(self.chain, task.head, other_heads=other_heads)

    def _set_seed(self, number: int, stage: int, substage: int) -> int:
        """Seed the random numbers of one stage of one task, independent of what was done before."""
        seed = int(
            np.random.SeedSequence([self.seed, number + 1, stage, substage]).generate_state(1)[0]
        )
        pyro.set_rng_seed(seed)
        return seed

    # Measuring.

    def accuracies(self, learned: int, numbers: Sequence[int]) -> list[float]:
        """Measure the accuracies on tasks after learning the task of number ``learned``."""
        has_labels = self.coreset is not None and self.coreset.use == "labels"
        if has_labels and self.stream.num_heads == 1:
            with self._refine(slice(learned + 1), learned, learned) as guide:
                return [self._accuracy(guide, learned, number) for number in numbers]
        result = []
        for number in numbers:
            if not has_labels or number > learned:  # Nothing to refine with is kept of this task.
                result.append(self._accuracy(_guide_without_sites, learned, number))
                continue
            with self._refine(slice(number, number + 1), learned, number) as guide:
                result.append(self._accuracy(guide, learned, number))
        return result

    def accuracies_before_learning(self, number: int) -> tuple[float, float]:
        """Measure the accuracies on the task of this number before it is learned: the chain's, and without training."""
        self._check_network(self.stream[number])
        (of_chain,) = self.accuracies(number - 1, [number])
        return of_chain, self._accuracy(_guide_without_sites, number - 1, number, UNTRAINED)

    @contextmanager
    def _refine(self, tasks: slice, learned: int, number: int) -> Iterator[Any]:
        """Train a guide on the kept rows of tasks with the head of this task, and restore the chain afterwards."""
        assert self.coreset is not None
        rows = self.chain.coresets.labeled(tasks)
        state = copy_state(self.chain.state_dict())
        num_data = self.chain.likelihood.num_data
        options = {**self.fit_options, **self.coreset.fit_options}
        try:
            yield self._train(self.stream[number], rows, (learned, CORESET, number), options)
        finally:
            self.chain.load_state_dict(state)
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
        with prefix_errors(f"task {task.name!r} cannot be predicted"):
            return predict(model, guide, x, num_samples)

    def _measured(self, task: Task) -> Pair:
        """Return the rows of a task to measure on."""
        rows = getattr(task, self.measure_on)
        if rows is None:
            raise ValueError(
                f"task {task.name!r} must have {self.measure_on} data to measure on, got none"
            )
        return rows

    # Resuming.

    def begin(self, accuracies: AccuracyMatrix | None) -> AccuracyMatrix:
        """Return the accuracies on the tasks learned so far: of the checkpoint, if there is one, or those given."""
        state = None if self.file is None else self.file.load(device_of(self.chain))
        if self.file is not None and state is not None:
            accuracies = self._resume(self.file, state)
        if accuracies is None:
            accuracies = AccuracyMatrix.empty(())
        self._check_learned(accuracies)
        self.chain.coresets.check(self.coreset, accuracies.names)
        # A chain that has learned no new task yet is saved too, so that a killed run begins where this one does.
        if state is None or len(accuracies.names) == len(self.stream):
            self.save(accuracies)
        return accuracies

    def _check_learned(self, accuracies: AccuracyMatrix) -> None:
        """Raise a ValueError unless the stream begins with tasks that the chain has learned."""
        names = dict(enumerate(self.stream.names))
        for number, name in enumerate(accuracies.names):
            if names.get(number) != name:
                raise ValueError(
                    f"stream must begin with the tasks of after: task {number} must be {name!r}, got "
                    f"{names.get(number)!r}"
                )
        if bool(accuracies.values[-1:].isnan().any()):
            raise ValueError(
                f"after must have all accuracies after its last task, {accuracies.names[-1]!r}, got NaN"
            )
        if accuracies.names and not self.chain.prior:
            raise ValueError(
                "chain must have learned the tasks of after, got a chain that has learned nothing"
            )

    def save(self, matrix: AccuracyMatrix) -> None:
        """Write the chain and the accuracies on the tasks that it has learned."""
        if self.file is None:
            return
        self.file.save(
            {
                "settings": self._settings(),
                "values": matrix.values,
                "baseline": matrix.baseline,
                "chain": self.chain.state_dict(),
                "stateful": states(self._stateful()),
            }
        )
        for task_file in self.file.path.parent.glob("task-*.pt"):
            task_file.unlink()

    def _resume(self, file: Checkpoint, state: State) -> AccuracyMatrix:
        """Check and load what a checkpoint holds, and return the accuracies on the tasks learned so far."""
        settings = self._settings()
        # More tasks may follow.
        settings["tasks"] = settings["tasks"][: len(state["settings"]["tasks"])]
        file.check_settings(state["settings"], settings)
        file.check_entries(
            "model", model_entries(state["chain"]), model_entries(self.chain.state_dict())
        )
        load_states(self._stateful(), state["stateful"])
        self.chain.load_state_dict(state["chain"])
        return AccuracyMatrix(
            state["values"], self.stream.names[: len(state["values"])], state["baseline"]
        )

    def _settings(self) -> Settings:
        """Return the plain settings that a checkpoint must have been made with."""
        return {
            "form": self.chain.form,
            "weight": self.chain.weight,
            "fewest_steps": self.fewest_steps,
            "tasks": self.stream.names,
            "measure_on": self.measure_on,
            "num_samples": self.num_samples,
            "seed": self.seed,
            **plain_settings({} if self.coreset is None else vars(self.coreset), prefix="coreset."),
            **plain_settings(self.fit_options),
            **plain_settings(self.first_task, prefix="first_task."),
        }

    def _stateful(self) -> dict[str, Any]:
        """Return what may have a state from task to task: attributes of the loss, and the callback."""
        callback = self.fit_options.get("callback")
        return {
            **stateful_attributes(self.fit_options.get("loss")),
            "callback": getattr(callback, "__self__", callback),
        }


def _batch_size(
    name: str,
    rows: int,
    fewest_steps: int,
    epochs: int = 10,
    batch_size: int | None = None,
    **_: object,
) -> int:
    """Return a size of batches, at most the given one, with which a task of so many rows has enough steps."""
    size = batch_size or DEFAULT_BATCH_SIZE
    while epochs * -(-rows // size) < fewest_steps and size >= 2 * SMALLEST_BATCH:
        size //= 2
    steps = epochs * -(-rows // size)
    if steps < fewest_steps:
        warn(
            f"task {name!r} has {steps} steps in batches of {size}, and needs {fewest_steps} (fewest_steps); "
            f"give it more epochs than {epochs}"
        )
    return size


def _guide_without_sites(*args: object, **kwargs: object) -> None:
    """Draw nothing, so that all sites are drawn from the model's prior."""
