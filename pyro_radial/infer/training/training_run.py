# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One training run, step by step, with everything that a checkpoint of it must hold."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pyro_radial._pyro.compat import mark_stepped, tree_map_only
from pyro_radial._pyro.random_state import noise_of, rng_state, seeded, set_rng_state
from pyro_radial._pyro.state import has_state, load_states, states
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.loss_terms import LossTerms
from pyro_radial.infer.training.batches import Batches, parts
from pyro_radial.infer.training.checkpoint import (
    State,
    check_data,
    check_settings,
    entry_kinds,
    load_checkpoint,
    save_checkpoint,
)
from pyro_radial.infer.training.data import Rows, device_of
from pyro_radial.infer.training.data_fingerprint import data_fingerprint
from pyro_radial.infer.training.gradient_step import GradientStep
from pyro_radial.infer.training.loss_gradients import LossGradients
from pyro_radial.infer.training.not_finite import check_parameters, check_start, not_finite_error, unwarned
from pyro_radial.infer.training.optimizers import stored_names
from pyro_radial.infer.training.processes import Processes
from pyro_radial.infer.training.run_settings import check_alike, details, settings_of
from pyro_radial.infer.training.trained import Trained
from pyro_radial.infer.training.validation import validation_nll
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine import mean_only

__all__ = ["Record", "TrainingRun"]

Record = dict[str, float]

# Added to the seed of a run for what is drawn before its first step.
SET_UP = 2**32

RESUMED = ("epoch", "step_in_epoch", "best_epoch", "sums", "kl_weight", "history", "ended", "best")
SAVED = (
    *RESUMED,
    "settings",
    "data",
    "shuffle_seed",
    "optimizer",
    "processes",
    "learning_rates",
    "scaler",
    "guide",
    "model",
    "loose",
)


class TrainingRun:
    """The state of one training run; its parameters are those of :func:`~pyro_radial.fit`, checked.

    Several processes that train together have one such run each, and all take its steps at once. Each evaluates the
    loss on its own rows with noise of its own. What they sum is weighted by their rows, so that it is the gradient of
    all rows' loss, which has the KL once. That is done here, not by ``DistributedDataParallel``: it knows modules alone
    and no ``pyro.param``, weighs processes alike, and where one fails the others wait for it.

    :param Processes processes: this process among those that train together.
    :param int shuffle_seed: of the orders of the rows, the same in all processes.
    :param make_optimizer: a function from parameters, by their names in Pyro's store, to a torch optimizer.
    :param make_scheduler: a function from that to a scheduler of its learning rates, or None.
    :param str scheduler_interval: whether that takes a step after each "step" or "epoch".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        loss: RadialELBO,
        rows: Rows,
        *,
        processes: Processes,
        shuffle_seed: int,
        batch_size: int,
        accumulate: int,
        pretrain_epochs: int,
        make_optimizer: Callable[[Mapping[str, Tensor]], Optimizer],
        make_scheduler: Callable[[Optimizer], Any] | None,
        scheduler_interval: str,
        seed: int | None,
        validation: Rows | None,
        patience: int | None,
        num_data: int,
        clip_norm: float | None,
        autocast: torch.dtype | None,
        compile: bool,
    ) -> None:
        self.loss, self.accumulate, self.pretrain_epochs = loss, accumulate, pretrain_epochs
        self.validation, self.patience, self.num_data = validation, patience, num_data
        self.processes = processes
        device = device_of(guide, model)
        self.batches = Batches(rows, batch_size, shuffle_seed, device, processes.rank, processes.size)
        check_start(loss(model, guide).named_parameters())  # type: ignore[arg-type]
        # What is drawn here must not depend on whether a run starts or resumes, nor move its random numbers.
        with seeded(SET_UP + shuffle_seed, self.batches.device):
            first_rows = self.batches.first_rows()
            self.trained = Trained(model, guide, first_rows, autocast)
            self.trained.set_up(loss, first_rows)
        self.parameters = self.trained.parameters(loss)
        self.optimizer = make_optimizer(stored_names({n: p for n, p in self.parameters.items() if p.requires_grad}))
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.scheduler_interval = scheduler_interval
        self._check_scheduler()
        self.gradient_step = GradientStep(self.optimizer, clip_norm, autocast, self.device)
        self.pretraining_loss = RadialELBO(kl_weight=0.0)
        usual_rows = -(-min(batch_size, len(rows)) // accumulate)
        self.gradients = LossGradients(self.trained, loss, self.gradient_step, usual_rows if compile else None)
        self.pretraining_gradients = LossGradients(self.trained, self.pretraining_loss, self.gradient_step, None)
        self.settings = settings_of(
            model,
            guide,
            loss,
            self.optimizer,
            scheduler_interval=scheduler_interval,
            num_data=num_data,
            rows=len(rows),
            processes=processes.size,
            batch_size=batch_size,
            accumulate=accumulate,
            pretrain_epochs=pretrain_epochs,
            seed=seed,
            validation=validation is not None,
            clip_norm=clip_norm,
            autocast=str(autocast),
            compile=compile,
        )
        self.data: dict[str, dict[str, Any]] = {}
        self.epoch = self.step_in_epoch = self.best_epoch = 0
        self.sums = {"loss": 0.0, "nll": 0.0, "kl": 0.0}
        self.history: list[Record] = []
        self.ended = False
        self.best: State | None = None
        self.latest: Record = {}
        self.kl_weight = 1.0

    @property
    def device(self) -> torch.device:
        """Where the run takes place."""
        return self.trained.device

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return self.batches.per_epoch

    @property
    def steps_done(self) -> int:
        """Optimizer steps since the start of the run, across resumes."""
        return self.epoch * self.steps_per_epoch + self.step_in_epoch

    @property
    def _where(self) -> str:
        return f"epoch {self.epoch}, step {self.step_in_epoch}"

    def step(self) -> None:
        """Take one optimizer step on the next batch.

        :raises FloatingPointError: if the loss is NaN or infinite; no step is taken then.
        """
        with unwarned():
            self.optimizer.zero_grad()
            parameters = list(self.parameters.values())
            numbers = self.processes.sums(self._evaluate, len(self.sums) + len(parameters))
            self.latest = dict(zip(self.sums, numbers, strict=False))
            self.processes.sum_gradients(parameters, numbers[len(self.sums) :])
            self.gradient_step.take()
            self._schedule("step")
        for name, value in self.latest.items():
            self.sums[name] += value * self.batches.num_rows(self.step_in_epoch) / len(self.batches.rows)
        self.step_in_epoch += 1

    def _evaluate(self) -> list[float]:
        """This process's share in the terms of the loss, and of each parameter whether it has a gradient."""
        terms = self._accumulate_gradients(self.batches.get(self.epoch, self.step_in_epoch))
        return [*terms.values(), *(float(parameter.grad is not None) for parameter in self.parameters.values())]

    def _accumulate_gradients(self, batch: tuple[Any, Any]) -> Record:
        """Gradients of the batch in parts that share their noise; the mean terms, in nats per datum."""
        pretraining = self.epoch < self.pretrain_epochs
        loss = self.pretraining_loss if pretraining else self.loss
        noise = rng_state(self.device)
        totals = dict.fromkeys(self.sums, 0.0)
        own = self.batches.share(self.step_in_epoch)
        for part, part_share in parts(batch, self.accumulate):
            share = own * part_share
            # A schedule of the KL weight counts optimizer steps, however a batch is split.
            loss.step = self.steps_done
            with mean_only() if pretraining else nullcontext():
                gradients = self.pretraining_gradients if pretraining else self.gradients
                numbers = gradients.add(part, share, noise, self._where, self._check_num_data)
            for name, number in zip(totals, numbers, strict=True):
                totals[name] += number * share
        self.kl_weight = loss.terms.kl_weight
        return totals

    def _check_num_data(self, terms: LossTerms) -> None:
        """Refuse plates whose size is not that of the data, for then the KL has a wrong weight."""
        if terms.num_data not in (None, self.num_data):
            sites = " and ".join(f"'{name}'" for name in terms.nll_by_site)
            raise ValueError(
                f"fit: model must observe {sites} in a plate of the size of the data, {self.num_data}, got one of size "
                f"{terms.num_data}: pyro.plate('data', {self.num_data}, subsample=...); if that size is meant, say so: "
                f"fit(..., num_data={terms.num_data})"
            )

    def end_epoch(self) -> Record:
        """Close the epoch's record, measure the validation, and let the scheduler take its step.

        :raises FloatingPointError: if a parameter or the validation is not finite.
        """
        check_parameters(self.parameters, self._where)
        record = {"epoch": self.epoch, **self.sums, "kl_weight": self.kl_weight}
        if self.validation is None:
            self.best_epoch = self.epoch
        else:
            validation = self.validation
            value = record["validation_nll"] = self.processes.from_first(lambda: self._validate(validation))
            if self.best is None:
                self.best_epoch = self.epoch  # Until one is finite no epoch is better than the latest.
            if math.isfinite(value) and (self.best is None or value < self.history[self.best_epoch]["validation_nll"]):
                self.best_epoch, self.best = self.epoch, self.trained.copy_of_state()
        self.history.append(record)
        self._schedule("epoch", record)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.sums = dict.fromkeys(self.sums, 0.0)
        return record

    @property
    def stopped(self) -> bool:
        """Whether the callback has ended the run, or the patience of this call has run out."""
        waited = self.epoch - 1 - (0 if self.best is None else self.best_epoch)
        return self.ended or (self.patience is not None and waited >= self.patience)

    def _check_scheduler(self) -> None:
        if not (self.scheduler is None or has_state(self.scheduler)):
            raise ValueError(
                "fit: scheduler must be a function from an optimizer to a scheduler with step, state_dict and "
                f"load_state_dict, got one that returns {type(self.scheduler).__name__}"
            )
        if self.scheduler_interval == "step" and isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError(
                "fit: scheduler_interval must be 'epoch' with ReduceLROnPlateau, which needs the loss of an epoch, got "
                "'step'"
            )

    def _schedule(self, after: str, record: Record | None = None) -> None:
        """One step of the scheduler of the learning rates, if it is due after a step or an epoch."""
        if self.scheduler is None or after != self.scheduler_interval:
            return
        # Where the run was killed after them, or a scaled loss overflowed, none were steps of this object.
        mark_stepped(self.optimizer)
        plateau = record is not None and isinstance(self.scheduler, ReduceLROnPlateau)
        self.scheduler.step(*([record.get("validation_nll", record["loss"])] if record and plateau else []))

    @property
    def _parts(self) -> dict[str, Any]:
        """What has a state of its own besides model, guide and optimizer; a prior on functions is not trained."""
        of_loss = {f"loss.{name}": part for name, part in vars(self.loss).items() if not isinstance(part, nn.Module)}
        return {**of_loss, "scheduler": self.scheduler}

    def _validate(self, validation: Rows) -> float:
        """The validation, at the site that the loss reads function values from where it reads them."""
        value = validation_nll(self.trained, validation, getattr(self.loss, "function_site", FUNCTION_SITE))
        if math.isnan(value):
            raise not_finite_error(["the log predictive density of the validation data"], self._where)
        return value

    def restore_best(self) -> None:
        """Give the guide and the model the parameters of the best validation; the last, if none was finite."""
        if self.best is not None:
            self.trained.load(self.best)

    def begin(self, path: Path | None, epochs: int, **call: Any) -> None:
        """Begin with the others, and go on from a checkpoint if there is one.

        What cannot be written is found now, not after an epoch.

        :param call: what else of the call must be the same in all processes.
        :raises ValueError: for a run that is another one in another process, or in the checkpoint.
        """
        if path is None and self.processes.size == 1:
            return
        with self.processes.together():
            self._identify()
        if self.processes.size > 1:
            self._join({"epochs": epochs, "patience": self.patience, "checkpoint": path is not None, **call})
        if path is None:
            return
        saved = self.processes.from_first(
            lambda: load_checkpoint(path, torch.device("cpu"), needed=SAVED) if path.exists() else None
        )
        if saved is not None:
            with self.processes.together():
                self._load(path, tree_map_only(Tensor, lambda tensor: tensor.to(self.device), saved))
        if self.epoch < epochs and not self.stopped:
            self._write(path, rehearsal=True)

    def _join(self, call: dict[str, Any]) -> None:
        """Find that all processes do the same, and start from the first one's parameters, each with its own noise."""
        state = {role: entry_kinds(entries) for role, entries in self.trained.state().items()}
        rates = self.gradient_step.learning_rates
        check_alike(self.processes, {**call, "learning rates": rates, **self.settings, **self.data, "state": state})
        self.take_over()
        if self.processes.rank:
            pyro.set_rng_seed(noise_of(self.batches.seed, self.processes.rank))

    def take_over(self) -> None:
        """Give model and guide the state that they have in the first process, whose buffers alone count."""
        self.trained.take_over(self.processes)

    def end(self) -> None:
        """Leave all processes with the parameters to keep, and at one place in their random numbers."""
        self.restore_best()
        self.take_over()
        if self.processes.size > 1:
            set_rng_state(self.processes.from_first(lambda: rng_state(self.device)), self.device)

    def _identify(self) -> None:
        """Take down what the run is of, before it changes: what a checkpoint of it must agree with."""
        model, guide, loss = self.trained.model, self.trained.guide, self.loss
        self.settings |= details(model, guide, loss, self.scheduler, self.optimizer, self.parameters)
        rows = {"data": self.batches.rows, "validation data": self.validation}
        self.data = {name: data_fingerprint(r, self.device) for name, r in rows.items() if r is not None}

    def save(self, path: Path) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        self.take_over()
        self._write(path)

    def _write(self, path: Path, rehearsal: bool = False) -> None:
        own = {"rng": rng_state(self.device), "parts": states(self._parts)}
        of_each = self.processes.gather(tree_map_only(Tensor, Tensor.cpu, own))

        def write() -> None:
            if not rehearsal:
                check_parameters(self.parameters, self._where)
            save_checkpoint(path, self._state() | {"processes": of_each}, rehearsal=rehearsal)

        self.processes.from_first(write)

    def _state(self) -> State:
        state = {name: getattr(self, name) for name in (*RESUMED, "settings", "data")}
        state |= {"shuffle_seed": self.batches.seed, "optimizer": self.optimizer.state_dict()}
        return state | self.gradient_step.state() | self.trained.copy_of_state()

    def _load(self, path: Path, state: State) -> None:
        """Go on from a checkpoint of this very run; what is refused has changed nothing."""
        self.trained.check(path, state)
        check_settings(path, state["settings"], self.settings)
        for name, known in self.data.items():
            check_data(path, state["data"][name], known, name)
        self.optimizer.load_state_dict(state["optimizer"])
        own = state["processes"][self.processes.rank]
        load_states(self._parts, own["parts"])
        self.gradient_step.load(path, state, self.scheduler)
        self.trained.load(state)
        for name in RESUMED:
            setattr(self, name, state[name])
        self.batches.seed = state["shuffle_seed"]
        set_rng_state(own["rng"], self.device)

    def shown(self) -> dict[str, str]:
        """The latest terms, for the progress bar."""
        return {name: f"{self.latest[name]:.4g}" for name in ("nll", "kl")}
