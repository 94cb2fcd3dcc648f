# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The epochs of a training: records, validation, schedules, and checkpoints that lose nothing."""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import check_types, has_state, load_states, states
from pyro_radial._pyro.compat import mark_stepped, tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time, rng_state, seeded, set_rng_state
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.data import Batches, Rows, num_rows
from pyro_radial.infer.elbo import LossTerms, TermsELBO
from pyro_radial.infer.optim.joint import Optim, change_rates, check_fused_state
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.step.evaluate import AS_IT_IS, COMPILED, RECORDED
from pyro_radial.infer.step.graphs import Graphs
from pyro_radial.infer.step.not_finite import check_parameters
from pyro_radial.infer.training.checkpoint import Checkpoint, State
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.infer.training.settings import data_settings, optimizer_settings, run_settings
from pyro_radial.infer.training.trainer import Trainer
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.modules import evaluating
from pyro_radial.nn.supervised import find_network

Record = dict[str, float]
TERMS = ("loss", "nll", "kl")

# Added to the seed of a run, for draws before its first step.
SET_UP = 2**32
# A recording takes some seconds and then saves some 40 ms a step on a GPU; compiling it takes 20 s, and saves 0.7 ms.
STEPS_TO_CAPTURE, STEPS_TO_COMPILE = 100, 30_000
VALIDATION_SEED = 0
VALIDATION_SAMPLES = 16
# What a resume restores as it is, and what a checkpoint must have.
RESUMED = (
    "epoch",
    "step_in_epoch",
    "best_epoch",
    "start",
    "sums",
    "kl_weight",
    "history",
    "ended",
    "best",
    "graphs",
)
SAVED = (
    *RESUMED,
    "settings",
    "data",
    "shuffle_seed",
    "rng",
    "loss",
    "optimizer",
    "guide",
    "model",
    "loose",
)


class TrainingRun:
    """Train for some epochs; the parameters are those of :func:`~pyro_radial.fit`, checked."""

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        loss: TermsELBO,
        batches: Batches,
        optim: Optim,
        scheduler: Any,
        validation: Rows | None,
        *,
        seed: int | None,
        options: FitOptions,
        graphs: str = AS_IT_IS,
        callback: Callable[[Record], Any] | None = None,
    ) -> None:
        self.batches, self.validation, self.seed, self.options = batches, validation, seed, options
        self.callback, self.graphs = callback, graphs
        # The state of a method is that of its object.
        self._callback_parts = {"callback": getattr(callback, "__self__", callback)}
        self.num_data = options.num_data or len(batches.rows)
        usual_rows = -(-min(batches.size, len(batches.rows)) // options.accumulate)
        self._first = self._checked_rows(model)
        # These draws must not depend on whether a run starts or resumes, nor move its random numbers.
        with seeded(SET_UP + batches.seed, batches.device):
            self.trainer = Trainer(
                model,
                guide,
                self._first,
                loss=loss,
                optim=scheduler if isinstance(scheduler, PyroLRScheduler) else optim,
                clip_norm=options.clip_norm,
                autocast=options.autocast,
                accumulate=options.accumulate,
                graphs=None if graphs == AS_IT_IS else Graphs(),
                compile_rows=usual_rows if graphs == COMPILED else None,
                check=self._check_num_data,
            )
        self.scheduler = _made(scheduler, self.trainer.optimizer, options.scheduler_interval)
        self.settings: dict[str, Any] = {}
        self.data: dict[str, dict[str, Any]] = {}
        self.epoch = self.step_in_epoch = self.best_epoch = 0
        #: The loss, negative log-likelihood and KL of the epoch so far, on the device.
        self.sums = self._no_terms()
        self.history: list[Record] = []
        #: The terms of the first step.
        self.start: Record = {}
        self.ended = False
        self.best: State | None = None
        self.kl_weight = 1.0

    @property
    def stopped(self) -> bool:
        """Whether the callback has ended the run, or patience has run out."""
        waited = self.epoch - 1 - (0 if self.best is None else self.best_epoch)
        return self.ended or (self.options.patience is not None and waited >= self.options.patience)

    def train(self, epochs: int, checkpoint: Checkpoint | None, progress: bool) -> None:
        """Train the remaining epochs."""
        every, total = self.options.checkpoint_every, epochs * self.batches.per_epoch
        done = min(self.trainer.steps_done, total)
        with tqdm(total=total, initial=done, desc="fit", unit="step", disable=not progress) as bar:
            while self.epoch < epochs and not self.stopped:
                for _ in range(self.step_in_epoch, self.batches.per_epoch):
                    terms = self.step()
                    # Reading the terms waits for the device, so the bar has those of its last move.
                    if bar.update() or (progress and bar.n == total):
                        _, nll, kl = terms.tolist()
                        bar.set_postfix({"nll": f"{nll:.4g}", "kl": f"{kl:.4g}"}, refresh=False)
                    if checkpoint is not None and every and self.trainer.steps_done % every == 0:
                        self.save(checkpoint)
                self.ended = self._asks_to_stop(self.end_epoch())
                if checkpoint is not None and (not every or self.stopped or self.epoch == epochs):
                    self.save(checkpoint)

    def step(self) -> Tensor:
        """Take one optimizer step on the next batch; returns its terms."""
        of_means = self.epoch < self.options.mean_only_epochs
        batch = self.batches.get(self.epoch, self.step_in_epoch)
        terms, self.kl_weight = self.trainer.step(batch, of_means=of_means)
        self._schedule("step")
        if not self.start:
            self.start = {
                **dict(zip(TERMS, terms.tolist(), strict=True)),
                "kl_weight": self.kl_weight,
            }
        self.sums += terms * self.batches.num_rows(self.step_in_epoch) / len(self.batches.rows)
        self.step_in_epoch += 1
        return terms

    def end_epoch(self) -> Record:
        """Close the epoch's record, validate, and let the scheduler take its step."""
        self.trainer.look()
        check_parameters(self.trainer.parameters.items(), self.trainer.steps_done)
        sums = dict(zip(TERMS, self.sums.tolist(), strict=True))
        record: Record = {"epoch": self.epoch, **sums, "kl_weight": self.kl_weight}
        if self.best is None:
            self.best_epoch = (
                self.epoch
            )  # Until a validation is finite, the latest epoch is the best.
        if self.validation is not None:
            value = record["validation_nll"] = self._validate(self.validation)
            if math.isfinite(value) and (
                self.best is None or value < self.history[self.best_epoch]["validation_nll"]
            ):
                self.best_epoch, self.best = self.epoch, self.trainer.copy_of_modules()
        self.history.append(record)
        self._schedule("epoch", record)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.sums = self._no_terms()
        return record

    def begin(self, checkpoint: Checkpoint, saved: State | None, epochs: int) -> None:
        """Resume from what a checkpoint's file holds, if it exists, and check that the file can be written."""
        self._identify()
        if saved is not None:
            self._load(checkpoint, saved)
        if self.epoch < epochs and not self.stopped:
            checkpoint.save(self._state(), dry_run=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        self.trainer.look()
        check_parameters(self.trainer.parameters.items(), self.trainer.steps_done)
        checkpoint.save(self._state())

    def end(self) -> None:
        """Leave guide and model with the best parameters."""
        if self.best is not None:
            self.trainer.load_modules(self.best)

    def _no_terms(self) -> Tensor:
        return torch.zeros(len(TERMS), dtype=torch.float64, device=self.trainer.device)

    def _asks_to_stop(self, record: Record) -> bool:
        return self.callback is not None and bool(self.callback(dict(record)))

    def _checked_rows(self, model: Callable[..., Any]) -> Any:
        """Return the first rows, once the targets of all rows are known to fit."""
        with seeded(SET_UP + self.batches.seed, self.batches.device):
            first = self.batches.first_rows()
            check = target_check(model, first[0])
        for rows in (self.batches.rows, self.validation):
            if check is not None and rows is not None:
                rows.check_targets(check)
        return first

    def _check_num_data(self, terms: LossTerms) -> None:
        """Refuse plates of another size than the data, because then the KL has a wrong weight."""
        if not terms.nll_by_site:
            raise ValueError(
                "model must observe the targets in a sample site, as SupervisedModel does, got none"
            )
        if terms.num_data is None:
            terms.per_datum()  # It has the words for this.
        if terms.num_data != self.num_data:
            sites = " and ".join(f"'{name}'" for name in terms.nll_by_site)
            raise ValueError(
                f"model must observe {sites} in a plate of the size of the data, {self.num_data}, got one of size "
                f"{terms.num_data}: pyro.plate('data', {self.num_data}, subsample=...); if that size is "
                "the product of several plates, as for a table of counts, or you mean it, use "
                f"fit(..., options=FitOptions(num_data={terms.num_data}))"
            )

    def _schedule(self, after: str, record: Record | None = None) -> None:
        """Let the scheduler take a step if it is due after a step or an epoch."""
        if self.scheduler is None or after != self.options.scheduler_interval:
            return
        # After a resume, or if a scaled loss overflowed, this optimizer object has not taken a step.
        mark_stepped(self.trainer.optimizer)
        if record is not None and isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(record.get("validation_nll", record["loss"]))
        else:
            self.scheduler.step()

    def _validate(self, validation: Rows) -> float:
        """Return the negative log predictive density per datum; leaves the training's own noise alone."""
        x, y = validation.all()
        trainer = self.trainer
        site = getattr(trainer.loss, "function_site", FUNCTION_SITE)
        number = 1 if _is_point(trainer.guide) else VALIDATION_SAMPLES
        with seeded(VALIDATION_SEED, trainer.device):
            draws = predict(trainer.model, trainer.guide, x, num_samples=number, function_site=site)
            value = -float(draws.log_prob(y).mean())
        if math.isnan(value):
            raise FloatingPointError(
                f"not finite after epoch {self.epoch}: the log predictive density of the validation data; try a "
                "smaller learning rate"
            )
        return value

    def _identify(self) -> None:
        """Write down what the run is, before it changes."""
        trainer, changeable = self.trainer, ("patience", "checkpoint_every")
        self.settings = {
            **run_settings(trainer.model, trainer.guide, trainer.loss, self.scheduler, self._first),
            **{
                name: value
                for name, value in asdict(self.options).items()
                if name not in changeable
            },
            **optimizer_settings(
                trainer.optimizer, trainer.parameters, trainer.module_parameters().keys()
            ),
            "autocast": str(self.options.autocast),
            "num_data": self.num_data,
            "rows": len(self.batches.rows),
            "batch_size": self.batches.size,
            "seed": self.seed,
            "validation": self.validation is not None,
        }
        rows = {"data": self.batches.rows, "validation data": self.validation}
        self.data = {
            name: data_settings(known) for name, known in rows.items() if known is not None
        }

    def _state(self) -> State:
        state = {name: getattr(self, name) for name in (*RESUMED, "settings", "data")}
        state["sums"] = dict(zip(TERMS, self.sums.tolist(), strict=True))
        state |= {"shuffle_seed": self.batches.seed, "rng": rng_state(self.trainer.device)}
        state |= {
            "scheduler": states({"own": self.scheduler}),
            "callback": states(self._callback_parts),
        }
        return state | self.trainer.state_dict()

    def _load(self, checkpoint: Checkpoint, state: State) -> None:
        """Resume this very run; if it is refused, nothing has changed."""
        trainer = self.trainer
        trainer.check_entries(checkpoint, state)
        checkpoint.check(state["settings"], self.settings)
        checkpoint.check(state["data"], self.data)
        check_fused_state(trainer.optimizer, state["optimizer"], checkpoint.path)
        load_states(self._callback_parts, state.get("callback", {}))
        trainer.load_state_dict(state)
        load_states({"own": self.scheduler}, state["scheduler"])
        before, now = state["learning_rates"], trainer.learning_rates
        change_rates(trainer.optimizer, self.scheduler, before, now, checkpoint.path)
        for name in RESUMED:
            setattr(self, name, state[name])
        self.sums = self._no_terms().copy_(
            torch.tensor([state["sums"][name] for name in TERMS], dtype=torch.float64)
        )
        self.batches.seed = state["shuffle_seed"]
        set_rng_state(state["rng"], trainer.device)


def target_check(model: Callable[..., Any], x: Any) -> Callable[[Any], None] | None:
    """Return a check of any number of targets of a :class:`~pyro_radial.SupervisedModel`, or None for another model."""
    network = find_network(model)
    if network is None or network.likelihood is None:
        return None
    with one_at_a_time(), evaluating(model), torch.no_grad(), poutine.block():
        values = network(x, network.sample_parameters())

    def check(y: Any) -> None:
        if isinstance(values, Tensor):
            check_types(Tensor, y=y)
        # All outputs have the shape of the first.
        rows = num_rows(y)
        network.likelihood.check_target(
            tree_map(lambda f: f[:1].expand(rows, *f.shape[1:]), values), y
        )

    return check


def way_of(options: FitOptions, device: torch.device, steps: int) -> str:
    """Return how to run a training of so many steps."""
    if options.compile is not None:
        return COMPILED if options.compile else AS_IT_IS
    if device.type != "cuda" or steps < STEPS_TO_CAPTURE or options.autocast is torch.float16:
        return AS_IT_IS
    return RECORDED if steps < STEPS_TO_COMPILE else COMPILED


def _is_point(guide: nn.Module) -> bool:
    """Return whether all draws are alike."""
    return isinstance(guide, AutoPerSite) and all(
        family.is_point for family in guide.chosen_families().values()
    )


def _made(scheduler: Any, optimizer: Any, interval: str) -> Any:
    """Return a scheduler of an optimizer's learning rates, or None."""
    if scheduler is None:
        return None
    if isinstance(scheduler, PyroLRScheduler):
        scheduler = partial(scheduler.pt_scheduler_constructor, **scheduler.kwargs)
    made: Any = scheduler(optimizer)
    if not has_state(made):
        raise ValueError(
            "scheduler must be a function from an optimizer to a scheduler with step, state_dict and load_state_dict, "
            f"got one that returns {type(made).__name__}"
        )
    if interval == "step" and isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            "scheduler_interval must be 'epoch' with ReduceLROnPlateau, which needs the loss of an epoch, got 'step'"
        )
    return made
