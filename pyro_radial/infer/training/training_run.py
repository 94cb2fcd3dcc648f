# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A training: its steps and epochs, records, validation, schedules, and checkpoints that lose nothing."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import pyro
import torch
from pyro.optim import PyroLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import has_state, load_states, states, warn
from pyro_radial._pyro.compat import mark_stepped
from pyro_radial._pyro.random_numbers import one_at_a_time, rng_state, seeded, set_rng_state
from pyro_radial._pyro.types import Batch, Model
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.compiler.cache import Graphs
from pyro_radial.infer.data import Batches, Rows, num_rows, split_batch
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.infer.loss.not_finite import check_parameters
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.step.evaluation import Call, LossEvaluation, Mode, evaluate_loss, has_terms
from pyro_radial.infer.step.optimizer import (
    JointOptimizer,
    Optim,
    check_fused_state,
    make_optimizer,
)
from pyro_radial.infer.step.stepper import Stepper
from pyro_radial.infer.training.checkpoint import (
    Checkpoint,
    Settings,
    State,
    copy_state,
    plain_settings,
    stateful_attributes,
)
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.infer.training.predictive_widths import PredictiveWidths
from pyro_radial.infer.training.preflight import (
    check_num_data,
    make_parameters,
    make_target_check,
)
from pyro_radial.infer.training.progress import TERMS, Progress, Record, name_terms
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.modules import Autocast, evaluating
from pyro_radial.poutine import mean_only

# Added to the seed of a run, for draws before its first step.
SET_UP = 2**32
# A recording takes some seconds and then saves some 40 ms a step on a GPU; compiling it takes 20 s, and saves 0.7 ms.
STEPS_TO_CAPTURE, STEPS_TO_COMPILE = 100, 30_000
VALIDATION_SEED = 0
VALIDATION_SAMPLES = 16
CHECKPOINT_FORMAT = "fit 8"
# Attributes of a loss that a resumed run must share.
LOSS_SETTINGS = ("num_particles", "vectorize_particles", "kl_weight", "weight_space_kl")


class TrainingRun:
    """Train for some epochs; takes the arguments of :func:`~pyro_radial.fit` after its checks.

    :param mode: the :class:`Mode` of steps. If it is "compiled", the graph of a batch of the usual size is compiled at
        its first use and others are replayed as recorded, so a resumed run replays what an undisturbed one does.
    :param held_out: the rows that find the widths of a guide with predictive ones.
    :param planned_steps: the number of steps of the whole training, for such a guide.
    """

    def __init__(
        self,
        model: Model,
        guide: nn.Module,
        loss: TermsELBO,
        batches: Batches,
        optim: Optim,
        scheduler: Any = None,
        validation: Rows | None = None,
        *,
        seed: int | None = None,
        options: FitOptions,
        mode: str = Mode.AS_IT_IS,
        callback: Callable[[Record], Any] | None = None,
        held_out: Rows | None = None,
        planned_steps: int = 0,
    ) -> None:
        self.model = model
        self.guide = guide
        self.loss = loss
        self.batches = batches
        self.validation = validation
        self.seed = seed
        self.options = options
        self.callback = callback
        self.mode = mode
        self.device = batches.device
        # The state of a method is that of its object.
        self._callback_owner = {"callback": getattr(callback, "__self__", callback)}
        self.num_data = options.num_data or len(batches.rows)
        self._usual_rows = -(-min(batches.size, len(batches.rows)) // options.accumulate)
        first_rows = self._check_targets(held_out)
        if isinstance(scheduler, PyroLRScheduler):
            optim = scheduler
            scheduler = partial(scheduler.pt_scheduler_constructor, **scheduler.kwargs)
        check_parameters(self._module_parameters().items(), 0)
        self._program = model
        if options.autocast is not None:
            self._program = Autocast(model, options.autocast, self.device)
        # These draws must not depend on whether a run starts or resumes, nor move its random numbers.
        with seeded(SET_UP + batches.seed, self.device):
            self._loose = make_parameters(model, guide, first_rows)
            # Let the loss do what it does at its first call, such as find the nesting of plates; an error comes again
            # in the first step, with its number.
            with (
                _without_warnings(),
                evaluating(model, guide),
                torch.no_grad(),
                suppress(Exception),
            ):
                loss(self._program, guide)(*first_rows)  # type: ignore[arg-type]
            #: Everything that an optimizer can change, by name.
            self.parameters = {**self._module_parameters(), **self._loose}
            self.optimizer = self._make_optimizer(optim)
            self._graphs = None if mode == Mode.AS_IT_IS else Graphs()
            self._widths = None
            if held_out is not None:
                self._widths = PredictiveWidths(
                    model,
                    guide,
                    self._evaluate_loss,
                    held_out,
                    self.device,
                    planned_steps,
                    self.num_data,
                )
        # The learning rate of each group of parameters before any schedule.
        self._learning_rates = [float(group.get("lr", 0)) for group in self.optimizer.param_groups]
        self._likelihood = TermsELBO(kl_weight=0.0)
        joint_optimizer = JointOptimizer(self.optimizer, options.clip_norm)
        self._stepper = Stepper(self._evaluate, joint_optimizer, parameters=self.parameters)
        self.scheduler = _make_scheduler(scheduler, self.optimizer, options.scheduler_interval)
        self.progress = Progress(torch.zeros(len(TERMS), dtype=torch.float64, device=self.device))
        self._scheduler_settings = plain_settings(
            getattr(scheduler, "keywords", {}), prefix="scheduler."
        )

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken so far, across resumes."""
        return self.progress.epoch * self.batches.per_epoch + self.progress.step_in_epoch

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
        initial = min(self.steps_done, total)
        progress = self.progress
        with tqdm(total=total, initial=initial, desc="fit", unit="step", disable=not show) as bar:
            while progress.epoch < epochs and not self.stopped:
                for _ in range(progress.step_in_epoch, self.batches.per_epoch):
                    terms = self.step()
                    # Reading the terms waits for the device, so the bar shows them only when it moves.
                    if bar.update() or (show and bar.n == total):
                        _, nll, kl = terms.tolist()
                        bar.set_postfix({"nll": f"{nll:.4g}", "kl": f"{kl:.4g}"}, refresh=False)
                    is_due = save_interval and self.steps_done % save_interval == 0
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
        terms, kl_weight = self._step_on(self.batches.get(progress.epoch, number))
        self._schedule("step")
        rows = self.batches.num_rows(number)
        progress.add_step(terms, kl_weight, rows, len(self.batches.rows))
        if self._widths is not None:
            self._widths.step(self.steps_done)
        return terms

    def _step_on(self, batch: tuple[Batch, Batch]) -> tuple[Tensor, float]:
        """Take one optimizer step on inputs and targets, in the first epochs on the likelihood at the means alone.

        :returns: the loss, negative log-likelihood and KL in nats per datum, on the device, and the weight of the KL.
        :raises FloatingPointError: naming what is NaN or infinite in the loss; no step is taken. On a GPU it is raised
            some steps later, or at the end of an epoch.
        """
        of_means = self.progress.epoch < self.options.mean_only_epochs
        loss = self._likelihood if of_means else self.loss
        calls = [
            self._call(loss, rows, gradient_scale)
            for rows, gradient_scale in split_batch(batch, self.options.accumulate)
        ]
        with _without_warnings(), mean_only() if of_means else nullcontext():
            evaluations = self._stepper.step(calls, self.steps_done)
        values = torch.zeros(3, dtype=torch.float64, device=self.device)
        for evaluation, call in zip(evaluations, calls, strict=True):
            if evaluation.summary is not None:
                values += evaluation.summary.double() * call.gradient_scale
        terms = evaluations[-1].terms
        return values, 0.0 if of_means or terms is None else terms.kl_weight

    def end_epoch(self) -> Record:
        """Close the epoch's record, validate, and let the scheduler take its step."""
        self._look()
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
                improved = self._copy_modules()
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
        self._look()
        checkpoint.save(self._state())

    def end(self) -> None:
        """Leave guide and model with the best parameters."""
        if self.progress.best is not None:
            self._load_modules(self.progress.best)

    def _look(self) -> None:
        """Raise the error of a step since the last look, if its loss was not finite, or of a parameter that is not."""
        self._stepper.look()
        check_parameters(self.parameters.items(), self.steps_done)

    def _call(self, loss: TermsELBO, rows: tuple[Batch, Batch], gradient_scale: float) -> Call:
        """Return what to evaluate for some rows of a batch in the next step."""
        call = Call(
            loss,
            self._program,
            self.guide,
            rows,
            {},
            extra_parameters=self.parameters,
            weight=loss.weight_at(self.steps_done) if has_terms(loss) else 1.0,
            gradient_scale=gradient_scale,
            step=self.steps_done + 1,
            check=partial(check_num_data, num_data=self.num_data),
        )
        # The parts of a batch would overwrite each other's gradients in a captured graph.
        if self._graphs is None or self.options.accumulate > 1:
            return call
        return call._replace(
            optimizer=self.optimizer,
            eager_optimizer_reason=self._stepper.optimizer.eager_reason,
            stopped=self._stepper.stopped,
        )

    def _evaluate(self, call: Call) -> LossEvaluation:
        """Evaluate a part of a batch."""
        # The first epochs run inside of a handler.
        if self._graphs is None or self.progress.epoch < self.options.mean_only_epochs:
            return evaluate_loss(call)
        is_compiled = self.mode == Mode.COMPILED and num_rows(call.args[0]) == self._usual_rows
        return self._graphs(call, compile_now=is_compiled)

    def _evaluate_loss(self, loss: Any, x: Batch, y: Batch) -> LossEvaluation:
        """Evaluate a loss that takes no step, as it is or as a graph without compiled code."""
        call = Call(loss, self.model, self.guide, (x, y), {}, extra_parameters=self.parameters)
        return (
            evaluate_loss(call) if self._graphs is None else self._graphs(call, compile_now=False)
        )

    def _make_optimizer(self, optim: Optim) -> Optimizer:
        """Return an optimizer of all parameters that require gradients."""
        trained = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        return make_optimizer(optim, trained)

    def _module_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the guide, the model and the loss, by name."""
        return dict(self.loss(self.model, self.guide).named_parameters())  # type: ignore[arg-type]

    def _modules(self) -> dict[str, State]:
        """Return the state of the guide, of the model, and of parameters outside both."""
        model = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        # By position, because names in Pyro's store count the instances that a process has made.
        loose: State = {str(position): value for position, value in enumerate(self._loose.values())}
        return {"guide": self.guide.state_dict(), "model": model, "loose": loose}

    def _copy_modules(self) -> State:
        """Copy :meth:`_modules`, so that further training does not change it."""
        return {role: copy_state(entries) for role, entries in self._modules().items()}

    @torch.no_grad()
    def _load_modules(self, state: State) -> None:
        """Load what :meth:`_copy_modules` returned."""
        self.guide.load_state_dict(state["guide"])
        if isinstance(self.model, nn.Module):
            self.model.load_state_dict(state["model"])
        for name, value in self._modules()["loose"].items():
            value.copy_(state["loose"][name])

    def _check_targets(self, held_out: Rows | None) -> tuple[Batch, Batch]:
        """Check that the targets of all rows fit the model, and return the first rows."""
        with seeded(SET_UP + self.batches.seed, self.device):
            first_rows = self.batches.first_rows()
            check = make_target_check(self.model, first_rows[0])
        # Held-out rows are the validation if there is one.
        others = held_out if self.validation is None else self.validation
        for rows in (self.batches.rows, others):
            if check is not None and rows is not None:
                rows.check_targets(check)
        return first_rows

    def _schedule(self, interval: str, record: Record | None = None) -> None:
        """Let the scheduler take a step if it is due after this interval, a step or an epoch."""
        if self.scheduler is None or interval != self.options.scheduler_interval:
            return
        # After a resume this optimizer object has not taken a step.
        mark_stepped(self.optimizer)
        if record is not None and isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(record.get("validation_nll", record["loss"]))
        else:
            self.scheduler.step()

    def _validate(self, validation: Rows) -> float:
        """Return the negative log predictive density per datum; leaves the training's own noise alone."""
        x, y = validation.all()
        site = getattr(self.loss, "function_site", FUNCTION_SITE)
        # One draw is enough where all are the same.
        is_point = isinstance(self.guide, AutoPerSite) and all(
            family.is_point for family in self.guide.chosen_families().values()
        )
        number = 1 if is_point else VALIDATION_SAMPLES
        with seeded(VALIDATION_SEED, self.device):
            draws = predict(self.model, self.guide, x, num_samples=number, function_site=site)
            value = -float(draws.log_prob(y).mean())
        if math.isnan(value):
            raise FloatingPointError(
                f"not finite after epoch {self.progress.epoch}: the log predictive density of the validation data; "
                "try a smaller learning rate"
            )
        return value

    def _settings(self) -> Settings:
        """Return the plain settings of the run, which a resumed run must share."""
        loss_settings = {name: getattr(self.loss, name, None) for name in LOSS_SETTINGS}
        optimizer_settings = dict(self.optimizer.defaults)
        optimizer_settings.pop("lr", None)
        options = asdict(self.options)
        # These may change when a run resumes.
        del options["patience"]
        del options["checkpoint_every"]
        return {
            "guide": type(self.guide).__name__,
            "likelihood": type(getattr(self.model, "likelihood", None)).__name__,
            "loss": type(self.loss).__name__,
            **plain_settings(loss_settings, prefix="loss."),
            "optimizer": type(self.optimizer).__name__,
            **plain_settings(optimizer_settings, prefix="optimizer."),
            "sizes of parameter groups": tuple(
                len(group["params"]) for group in self.optimizer.param_groups
            ),
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
            **self._copy_modules(),
            "optimizer": self.optimizer.state_dict(),
            "learning_rates": self._learning_rates,
            "loss": states(stateful_attributes(self.loss)),
            "settings": self._settings(),
            "graphs": str(self.mode),
            "shuffle_seed": self.batches.seed,
            "rng": rng_state(self.device),
            **states({"scheduler": self.scheduler, "widths": self._widths}),
            "callback": states(self._callback_owner),
        }

    def _load(self, checkpoint: Checkpoint, state: State) -> None:
        """Resume the run from a checkpoint; an error leaves everything unchanged."""
        for role, entries in self._modules().items():
            checkpoint.check_entries("model" if role == "loose" else role, state[role], entries)
        checkpoint.check_settings(state["settings"], self._settings())
        check_fused_state(self.optimizer, state["optimizer"], checkpoint.path)
        load_states(self._callback_owner, state["callback"])
        self.optimizer.load_state_dict(state["optimizer"])
        load_states(stateful_attributes(self.loss), state["loss"])
        self._load_modules(state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if state["learning_rates"] != self._learning_rates:
            warn(
                f"checkpoint {checkpoint.path} was made with learning rates {state['learning_rates']} and goes on with "
                f"them, not with {self._learning_rates}; use another checkpoint file to start anew"
            )
        if self._widths is not None:
            self._widths.load_state_dict(state["widths"])
        self.progress.load_state_dict(state)
        self.batches.seed = state["shuffle_seed"]
        set_rng_state(state["rng"], self.device)


def choose_mode(options: FitOptions, device: torch.device, steps: int) -> str:
    """Return how to run a training of so many steps."""
    if options.compile is not None:
        return Mode.COMPILED if options.compile else Mode.AS_IT_IS
    if device.type != "cuda" or steps < STEPS_TO_CAPTURE:
        return Mode.AS_IT_IS
    return Mode.RECORDED if steps < STEPS_TO_COMPILE else Mode.COMPILED


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


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence Pyro's warnings about NaN in log-densities, because training stops with the name of the site."""
    # A filter of warnings would apply to all threads; instead Pyro does not look for NaN.
    with one_at_a_time(), pyro.settings.context(validate_poutine=False):
        yield
