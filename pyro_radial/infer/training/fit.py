# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A training loop with progress, validation, early stopping, and a resume that loses nothing."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyro
import torch
import torch.distributed as dist
from pyro.infer import ELBO
from pyro.optim import PyroLRScheduler, PyroOptim
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from pyro_radial._pyro.checks import optional, positive_count, random_seed, warn
from pyro_radial._pyro.types import Model
from pyro_radial.infer.data import Batches, Rows
from pyro_radial.infer.diagnose.diagnose import not_standardized
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.infer.step.optimizer import (
    DEFAULT_OPTIM,
    Optim,
    check_optim,
    rise_and_fall,
)
from pyro_radial.infer.training.checkpoint import Checkpoint
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.infer.training.predictive_widths import has_predictive_widths, hold_out
from pyro_radial.infer.training.progress import Progress, Record
from pyro_radial.infer.training.training_run import CHECKPOINT_FORMAT, TrainingRun, choose_mode
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.likelihoods import Bernoulli, Categorical, Likelihood
from pyro_radial.nn.modules import device_of, dtype_of

Scheduler = PyroLRScheduler | Callable[[Optimizer], Any] | Literal["cosine"]

COSINE = "cosine"
DEFAULT_BATCH_SIZE = 128
DEFAULT_OPTIONS = FitOptions()
# The learning rates of the means of a guide with predictive widths. That of SGD is for the mean loss of a datum: the
# curvature of the loss of classes is bounded, so one rate suits most networks.
SGD_RATE, MOMENTUM, ADAM_RATE = 0.1, 0.9, 2e-3
# The largest gradient of that loss; with few rows the first steps at a high rate would be too long.
MOST_NORM = 1.0
# After fewer steps a loss may still be on its way down.
FEWEST_STEPS = 100
# A loss that ends this many nats per datum above its start, and at more than twice of it, has diverged.
LEAST_RISE = 0.5


@dataclass(frozen=True)
class FitResult:
    """The result of :func:`fit`.

    :param history: one record per epoch: "epoch", "loss", "nll" and "kl" in nats per datum, "kl_weight", and
        "validation_nll" in nats per datum if there is a validation.
    :param int best_epoch: the epoch whose parameters the guide now has: the best on validation, else the last.
    :param bool stopped_early: whether ``patience`` or the callback ended the training.
    """

    history: list[Record]
    best_epoch: int
    stopped_early: bool


def fit(
    model: Callable[..., Any],
    guide: nn.Module,
    data: Any,
    *,
    epochs: int = 10,
    batch_size: int | None = None,
    optim: Optim = DEFAULT_OPTIM,
    scheduler: Scheduler | None = None,
    loss: TermsELBO | None = None,
    validation: Any = None,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    callback: Callable[[Record], Any] | None = None,
    progress: bool = True,
    options: FitOptions = DEFAULT_OPTIONS,
) -> FitResult:
    """Train a guide, and the parameters of its model, on mini-batches.

    Each epoch passes over the data once in random order. A run with a ``checkpoint`` can be killed at any moment; the
    same call resumes it and ends bit for bit where an undisturbed run does, on one machine. When you resume, you may
    change ``epochs`` and ``patience``. The optimizer and the scheduler go on with their saved learning rates; another
    rate raises a warning. For training in several processes see the page on scale.

    :param model: a Pyro model ``model(x, y)`` whose likelihood scales a mini-batch, such as
        :class:`~pyro_radial.nn.SupervisedModel`. Modules are trained in the mode that they are in.
    :param guide: its guide, an ``nn.Module`` such as :class:`~pyro_radial.infer.autoguide.AutoRadial`. With
        ``widths="predictive"`` its widths are those that predict held-out rows best.
    :param data: ``(x, y)``, where x is a tensor, a tuple or a dict of tensors; ``(x1, x2, ..., y)``; a map-style
        ``Dataset`` of such items; or a ``DataLoader`` of one. NumPy arrays are converted.
    :param int epochs: the passes over the data.
    :param int batch_size: the rows of one optimizer step; a ``DataLoader``'s own by default, else 128.
    :param optim: a function from parameters to a torch optimizer; or a Pyro optimizer, whose settings may be a function
        of a parameter's name, as with ``SVI``. By default Adam at 1e-3; with predictive widths SGD with momentum for
        classes, and else Adam at 2e-3, at rates that rise and fall.
    :param scheduler: a function from the optimizer to a torch scheduler; a Pyro scheduler, which replaces ``optim``; or
        "cosine" for learning rates that fall to zero over all steps along a cosine.
    :param loss: a :class:`~pyro_radial.TermsELBO` (the default) or :class:`~pyro_radial.FunctionalELBO`.
    :param validation: data as above; its negative log predictive density is measured after each epoch, and at the end
        guide and model get the parameters of the best epoch. Predictive widths see these rows too. For them ``fit``
        sets a tenth of the data aside if there is no validation.
    :param int seed: the seed for Pyro and torch at the start of a new run, below 2**32.
    :param checkpoint: the file to save to, and to resume from if it exists.
    :param callback: a function of each epoch's record; if it returns true, training stops. If the callback, or the
        object whose method it is, has ``state_dict`` and ``load_state_dict``, a checkpoint holds its state. Any other
        callback starts anew when you resume: one that counts its own calls stops too late.
    :param bool progress: whether to show a progress bar.
    :param FitOptions options: early stopping, compiled graphs, precision, gradient accumulation and more.
    :returns: a :class:`FitResult`.
    :raises ValueError: naming the argument, if a value is out of range, the data hold NaN, or a checkpoint is damaged,
        or from a run with another model or other settings.
    :raises FloatingPointError: naming the term and site, if a loss is NaN or infinite; no step is taken on it.
    :raises RuntimeError: in one of several processes, such as those of ``torchrun``.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(64, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
        >>> result = fit(model, AutoRadial(model), (x, x.sum(-1, keepdim=True)), epochs=3, seed=0, progress=False)
        >>> len(result.history), sorted(result.history[0])
        (3, ['epoch', 'kl', 'kl_weight', 'loss', 'nll'])
    """
    _check_one_process()
    loss = TermsELBO() if loss is None else loss
    epochs = positive_count("epochs", epochs)
    seed = optional(random_seed, "seed", seed)
    batch_size = optional(positive_count, "batch_size", batch_size)
    _check_parts(model, loss, validation, options)
    _check_optim_and_scheduler(optim, scheduler, options)
    file = None if checkpoint is None else Checkpoint(checkpoint, CHECKPOINT_FORMAT)
    dtype = dtype_of(guide, model)
    rows = Rows(data, "data", dtype)
    validation_rows = None if validation is None else Rows(validation, "validation", dtype)
    device = device_of(guide, model)
    saved = None if file is None else file.load(device)
    if seed is not None:
        pyro.set_rng_seed(seed)
    shuffle_seed = seed if seed is not None else int(torch.randint(2**31, ()))
    num_data, held_out = options.num_data or len(rows), None
    if has_predictive_widths(guide):
        # A resumed run sets the same rows aside.
        hold_out_seed = saved["shuffle_seed"] if saved else shuffle_seed
        rows, held_out = hold_out(rows, validation_rows, hold_out_seed)
    for likelihood in modules_of(Likelihood, model):
        likelihood.train_on(options.num_data or len(rows))
    size = batch_size or rows.batch_size or DEFAULT_BATCH_SIZE
    batches = Batches(rows, size, shuffle_seed, device)
    steps = epochs * batches.per_epoch
    schedules: dict[Any, Any] = {COSINE: partial(CosineAnnealingLR, T_max=steps)}
    if held_out is not None and optim is DEFAULT_OPTIM:
        optim = partial(Adam, lr=ADAM_RATE)
        if isinstance(getattr(model, "likelihood", None), Categorical | Bernoulli):
            optim = partial(SGD, lr=SGD_RATE / len(rows), momentum=MOMENTUM)
            options = replace(options, clip_norm=options.clip_norm or MOST_NORM * len(rows))
        schedules[None] = partial(rise_and_fall, steps=steps)
    if scheduler in schedules:
        scheduler = schedules[scheduler]
        options = replace(options, scheduler_interval="step")
    if rows.dataset is None:
        _warn(not_standardized(model, *rows.tensors))
    # With other epochs a resumed run goes on as it began.
    mode = saved["graphs"] if saved else choose_mode(options, batches.device, steps)
    run = TrainingRun(
        model,
        guide,
        loss,
        batches,
        optim,
        scheduler,
        validation_rows,
        seed=seed,
        options=options,
        mode=mode,
        callback=callback,
        held_out=held_out,
        planned_steps=steps,
    )
    if file is not None:
        run.begin(file, saved, epochs)
    run.train(epochs, file, progress)
    run.end()
    for likelihood in modules_of(Likelihood, model):
        likelihood.end_training(num_data)
    _warn(_find_divergence(run.progress, run.steps_done))
    return FitResult(run.progress.history, run.progress.best_epoch, run.stopped)


def _warn(advice: str | None) -> None:
    """Warn at the line that calls :func:`fit`."""
    if advice is not None:
        warn(advice)


def _find_divergence(progress: Progress, steps: int) -> str | None:
    """Return a warning if a term of the loss in the last epoch is far above its value at the first step, else None."""
    record = progress.history[-1]
    if steps < FEWEST_STEPS or progress.start["kl_weight"] != record["kl_weight"]:
        return None
    for name, words in (("nll", "negative log-likelihood"), ("loss", "loss")):
        start = progress.start[name]
        if record[name] - start > max(LEAST_RISE, abs(start)):
            return (
                f"the {words} ended at {record[name]:.3g} nats per datum, far above its start at {start:.3g}; try a "
                "smaller learning rate, or print(diagnose(model, guide, data))"
            )
    return None


def _check_one_process() -> None:
    """Raise a RuntimeError in one of several processes, which would each train a guide of their own."""
    joined = dist.is_available() and dist.is_initialized()
    size = str(dist.get_world_size()) if joined else os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise RuntimeError(
            f"fit trains in one process, got WORLD_SIZE={size}; Accelerate and Lightning train in several: see "
            '"Several processes" in docs/scale.md. To train in this process alone, unset WORLD_SIZE'
        )


def _check_parts(model: Model, loss: object, validation: object, options: FitOptions) -> None:
    if getattr(type(model), "forward", None) is BayesianModule.forward or not _takes_two(model):
        raise ValueError(
            "model must be a Pyro model of inputs and targets, model(x, y), such as "
            f"SupervisedModel(BayesianModule(net), likelihood), got {type(model).__name__}"
        )
    if not isinstance(loss, ELBO) or not hasattr(type(loss), "terms"):
        raise ValueError(f"loss must keep its terms, as TermsELBO does, got {type(loss).__name__}")
    if validation is None and options.patience is not None:
        raise ValueError(
            f"validation must be given with patience, got patience={options.patience} and no validation"
        )
    if validation is not None and getattr(model, "likelihood", None) is None:
        raise ValueError(
            "model must have an attribute `likelihood` for validation, as SupervisedModel has, got "
            f"{type(model).__name__} without one"
        )


def _takes_two(model: Model) -> bool:
    """Return whether a model can be called with inputs and targets, as far as its signature shows."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(None, None)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # A model within a handler has no signature.
    return True


def _check_optim_and_scheduler(optim: object, scheduler: object, options: FitOptions) -> None:
    check_optim(optim)
    if isinstance(optim, PyroLRScheduler):
        raise ValueError(
            "optim must have no learning rate schedule, got PyroLRScheduler; pass it as scheduler"
        )
    is_pyro = isinstance(scheduler, PyroLRScheduler)
    if scheduler is None and options.scheduler_interval == "step":
        raise ValueError("scheduler_interval must be left out without a scheduler, got 'step'")
    if is_pyro and optim is not DEFAULT_OPTIM:
        raise ValueError(
            f"optim must be left out with a Pyro scheduler, which has its own, got {type(optim).__name__}"
        )
    makes_scheduler = callable(scheduler) and not isinstance(scheduler, PyroOptim | LRScheduler)
    if not (makes_scheduler or is_pyro or scheduler in (None, COSINE)):
        raise ValueError(
            "scheduler must be a function from an optimizer to a torch scheduler, such as "
            "partial(torch.optim.lr_scheduler.StepLR, step_size=10), a Pyro scheduler, or 'cosine', got "
            f"{type(scheduler).__name__}"
        )
