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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import has_state, load_states, states, warn
from pyro_radial._pyro.compat import mark_stepped, tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time, rng_state, seeded, set_rng_state
from pyro_radial._pyro.types import Batch, Model
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.compiler.cache import Graphs
from pyro_radial.infer.data import Batches, Rows, num_rows
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.infer.loss.terms import LossTerms
from pyro_radial.infer.optim.joint import Optim, check_fused_state
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.step.evaluation import Mode
from pyro_radial.infer.training.checkpoint import Checkpoint, Settings, State, plain_settings
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.infer.training.progress import TERMS, Progress, Record, name_terms
from pyro_radial.infer.training.trainer import Trainer
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.modules import evaluating
from pyro_radial.nn.supervised import find_network

# Added to the seed of a run, for draws before its first step.
SET_UP = 2**32
# A recording takes some seconds and then saves some 40 ms a step on a GPU; compiling it takes 20 s, and saves 0.7 ms.
STEPS_TO_CAPTURE, STEPS_TO_COMPILE = 100, 30_000
VALIDATION_SEED = 0
VALIDATION_SAMPLES = 16
CHECKPOINT_FORMAT = "fit 5"
# Attributes of a loss that a resumed run must share.
LOSS_SETTINGS = ("num_particles", "vectorize_particles", "kl_weight", "weight_space_kl")


class TrainingRun:
    """Train for some epochs; takes the arguments of :func:`~pyro_radial.fit` after its checks."""

    def __init__(
        self,
        model: Model,
        guide: nn.Module,
        loss: TermsELBO,
        batches: Batches,
        optim: Optim,
        scheduler: Any,
        validation: Rows | None,
        *,
        seed: int | None,
        options: FitOptions,
        graphs: str = Mode.AS_IT_IS,
        callback: Callable[[Record], Any] | None = None,
    ) -> None:
        self.batches = batches
        self.validation = validation
        self.seed = seed
        self.options = options
        self.callback = callback
        self.graphs = graphs
        # The state of a method is that of its object.
        self._callback_owner = {"callback": getattr(callback, "__self__", callback)}
        self.num_data = options.num_data or len(batches.rows)
        usual_rows = -(-min(batches.size, len(batches.rows)) // options.accumulate)
        first_rows = self._check_targets(model)
        if isinstance(scheduler, PyroLRScheduler):
            optim = scheduler
            scheduler = partial(scheduler.pt_scheduler_constructor, **scheduler.kwargs)
        # These draws must not depend on whether a run starts or resumes, nor move its random numbers.
        with seeded(SET_UP + batches.seed, batches.device):
            self.trainer = Trainer(
                model,
                guide,
                first_rows,
                loss=loss,
                optim=optim,
                clip_norm=options.clip_norm,
                autocast=options.autocast,
                accumulate=options.accumulate,
                graphs=None if graphs == Mode.AS_IT_IS else Graphs(),
                compile_rows=usual_rows if graphs == Mode.COMPILED else None,
                check=partial(check_num_data, num_data=self.num_data),
            )
        self.scheduler = _make_scheduler(
            scheduler, self.trainer.optimizer, options.scheduler_interval
        )
        self.progress = Progress(
            torch.zeros(len(TERMS), dtype=torch.float64, device=self.trainer.device)
        )
        self._scheduler_settings = plain_settings(
            getattr(scheduler, "keywords", {}), prefix="scheduler."
        )

    @property
    def stopped(self) -> bool:
        """Whether the callback has ended the run, or patience has run out."""
        patience = self.options.patience
        if patience is not None and self.progress.epochs_since_best >= patience:
            return True
        return self.progress.ended

    def train(self, epochs: int, checkpoint: Checkpoint | None, show: bool) -> None:
        """Train the remaining epochs; with ``show``, behind a progress bar."""
        save_interval = self.options.checkpoint_every
        total = epochs * self.batches.per_epoch
        initial = min(self.trainer.steps_done, total)
        progress = self.progress
        with tqdm(total=total, initial=initial, desc="fit", unit="step", disable=not show) as bar:
            while progress.epoch < epochs and not self.stopped:
                for _ in range(progress.step_in_epoch, self.batches.per_epoch):
                    terms = self.step()
                    # Reading the terms waits for the device, so the bar shows them only when it moves.
                    if bar.update() or (show and bar.n == total):
                        _, nll, kl = terms.tolist()
                        bar.set_postfix({"nll": f"{nll:.4g}", "kl": f"{kl:.4g}"}, refresh=False)
                    is_due = save_interval and self.trainer.steps_done % save_interval == 0
                    if checkpoint is not None and is_due:
                        self.save(checkpoint)
                record = self.end_epoch()
                if self.callback is not None:
                    progress.ended = bool(self.callback(dict(record)))
                at_end = self.stopped or progress.epoch == epochs
                if checkpoint is not None and (not save_interval or at_end):
                    self.save(checkpoint)

    def step(self) -> Tensor:
        """Take one optimizer step on the next batch; returns its terms."""
        progress = self.progress
        number = progress.step_in_epoch
        batch = self.batches.get(progress.epoch, number)
        of_means = progress.epoch < self.options.mean_only_epochs
        terms, kl_weight = self.trainer.step(batch, of_means=of_means)
        self._schedule("step")
        rows = self.batches.num_rows(number)
        progress.add_step(terms, kl_weight, rows, len(self.batches.rows))
        return terms

    def end_epoch(self) -> Record:
        """Close the epoch's record, validate, and let the scheduler take its step."""
        self.trainer.look()
        progress = self.progress
        record: Record = {
            "epoch": progress.epoch,
            **name_terms(progress.sums),
            "kl_weight": progress.kl_weight,
        }
        improved = None
        if self.validation is not None:
            record["validation_nll"] = self._validate(self.validation)
            if progress.improves(record["validation_nll"]):
                improved = self.trainer.copy_of_modules()
        progress.end_epoch(record, improved)
        self._schedule("epoch", record)
        return record

    def begin(self, checkpoint: Checkpoint, saved: State | None, epochs: int) -> None:
        """Resume from what a checkpoint's file holds, if it exists, and check that the file can be written."""
        if saved is not None:
            self._load(checkpoint, saved)
        if self.progress.epoch < epochs and not self.stopped:
            checkpoint.save(self._state(), dry_run=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        self.trainer.look()
        checkpoint.save(self._state())

    def end(self) -> None:
        """Leave guide and model with the best parameters."""
        if self.progress.best is not None:
            self.trainer.load_modules(self.progress.best)

    def _check_targets(self, model: Model) -> tuple[Batch, Batch]:
        """Check that the targets of all rows fit the model, and return the first rows."""
        with seeded(SET_UP + self.batches.seed, self.batches.device):
            first_rows = self.batches.first_rows()
            check = make_target_check(model, first_rows[0])
        for rows in (self.batches.rows, self.validation):
            if check is not None and rows is not None:
                rows.check_targets(check)
        return first_rows

    def _schedule(self, interval: str, record: Record | None = None) -> None:
        """Let the scheduler take a step if it is due after this interval, a step or an epoch."""
        if self.scheduler is None or interval != self.options.scheduler_interval:
            return
        # After a resume this optimizer object has not taken a step.
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
                f"not finite after epoch {self.progress.epoch}: the log predictive density of the validation data; "
                "try a smaller learning rate"
            )
        return value

    def _settings(self) -> Settings:
        """Return the plain settings of the run, which a resumed run must share."""
        trainer = self.trainer
        loss_settings = {name: getattr(trainer.loss, name, None) for name in LOSS_SETTINGS}
        optimizer_settings = dict(trainer.optimizer.defaults)
        optimizer_settings.pop("lr", None)
        groups = trainer.optimizer.param_groups
        group_sizes = tuple(len(group["params"]) for group in groups)
        options = asdict(self.options)
        # These may change when a run resumes.
        del options["patience"]
        del options["checkpoint_every"]
        return {
            "guide": type(trainer.guide).__name__,
            "likelihood": type(getattr(trainer.model, "likelihood", None)).__name__,
            "loss": type(trainer.loss).__name__,
            **plain_settings(loss_settings, prefix="loss."),
            "optimizer": type(trainer.optimizer).__name__,
            **plain_settings(optimizer_settings, prefix="optimizer."),
            "sizes of parameter groups": group_sizes,
            "scheduler": type(self.scheduler).__name__,
            **self._scheduler_settings,
            **options,
            "autocast": str(self.options.autocast),
            "num_data": self.num_data,
            "rows": len(self.batches.rows),
            "batch_size": self.batches.size,
            "seed": self.seed,
            "validation": self.validation is not None,
        }

    def _state(self) -> State:
        return {
            **self.progress.state_dict(),
            **self.trainer.state_dict(),
            "settings": self._settings(),
            "graphs": str(self.graphs),
            "shuffle_seed": self.batches.seed,
            "rng": rng_state(self.trainer.device),
            **states({"scheduler": self.scheduler}),
            "callback": states(self._callback_owner),
        }

    def _load(self, checkpoint: Checkpoint, state: State) -> None:
        """Resume the run from a checkpoint; an error leaves everything unchanged."""
        trainer = self.trainer
        trainer.check_entries(checkpoint, state)
        checkpoint.check_settings(state["settings"], self._settings())
        check_fused_state(trainer.optimizer, state["optimizer"], checkpoint.path)
        load_states(self._callback_owner, state["callback"])
        trainer.load_state_dict(state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if state["learning_rates"] != trainer.learning_rates:
            warn(
                f"checkpoint {checkpoint.path} was made with learning rates {state['learning_rates']} and goes on with "
                f"them, not with {trainer.learning_rates}; use another checkpoint file to start anew"
            )
        self.progress.load_state_dict(state)
        self.graphs = state["graphs"]
        self.batches.seed = state["shuffle_seed"]
        set_rng_state(state["rng"], trainer.device)


def choose_mode(options: FitOptions, device: torch.device, steps: int) -> str:
    """Return how to run a training of so many steps."""
    if options.compile is not None:
        return Mode.COMPILED if options.compile else Mode.AS_IT_IS
    if device.type != "cuda" or steps < STEPS_TO_CAPTURE:
        return Mode.AS_IT_IS
    return Mode.RECORDED if steps < STEPS_TO_COMPILE else Mode.COMPILED


def _is_point(guide: nn.Module) -> bool:
    """Return whether all draws of a guide are the same."""
    if not isinstance(guide, AutoPerSite):
        return False
    return all(family.is_point for family in guide.chosen_families().values())


def _make_scheduler(scheduler: Any, optimizer: Optimizer, interval: str) -> Any:
    """Return a scheduler of an optimizer's learning rates, or None."""
    if scheduler is None:
        return None
    torch_scheduler: Any = scheduler(optimizer)
    if not has_state(torch_scheduler):
        raise ValueError(
            "scheduler must be a function from an optimizer to a scheduler with step, state_dict and load_state_dict, "
            f"got one that returns {type(torch_scheduler).__name__}"
        )
    if interval == "step" and isinstance(torch_scheduler, ReduceLROnPlateau):
        raise ValueError(
            "scheduler_interval must be 'epoch' with ReduceLROnPlateau, which needs the loss of an epoch, got 'step'"
        )
    return torch_scheduler


def make_target_check(model: Model, x: Batch) -> Callable[[Batch], None] | None:
    """Return a check of any number of targets of a :class:`~pyro_radial.SupervisedModel`, or None for another model."""
    network = find_network(model)
    if network is None or network.likelihood is None:
        return None
    with one_at_a_time(), evaluating(model), torch.no_grad(), poutine.block():
        values = network(x, network.sample_parameters())

    def check(y: Batch) -> None:
        # All outputs have the shape of the first.
        rows = num_rows(y)
        repeated = tree_map(lambda f: f[:1].expand(rows, *f.shape[1:]), values)
        network.likelihood.read_target(repeated, y)

    return check


def check_num_data(terms: LossTerms, num_data: int) -> None:
    """Raise a ValueError for plates of another size than the data, because then the KL has a wrong weight."""
    if not terms.nll_by_site:
        raise ValueError(
            "model must observe the targets in a sample site, as SupervisedModel does, got none"
        )
    if terms.num_data is None:
        terms.per_datum()  # It has the words for this.
    if terms.num_data != num_data:
        sites = " and ".join(f"'{name}'" for name in terms.nll_by_site)
        raise ValueError(
            f"model must observe {sites} in a plate of the size of the data, {num_data}, got one of size "
            f"{terms.num_data}: pyro.plate('data', {num_data}, subsample=...); if that size is "
            "the product of several plates, as for a table of counts, or you mean it, use "
            f"fit(..., options=FitOptions(num_data={terms.num_data}))"
        )
