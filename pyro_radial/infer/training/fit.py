# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A training loop with progress, validation, early stopping, and a resume that loses nothing."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import non_negative_integer, positive_count, positive_float
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.training.data import Rows, device_of, dtype_of
from pyro_radial.infer.training.optimizers import fused_optimizer, joint_optimizer
from pyro_radial.infer.training.processes import joined
from pyro_radial.infer.training.sole_writer import sole_writer
from pyro_radial.infer.training.training_run import Record, TrainingRun
from pyro_radial.nn.likelihood import set_num_data

__all__ = ["FitResult", "fit"]

Optim = PyroOptim | Callable[[list[Tensor]], Optimizer]
Scheduler = PyroLRScheduler | Callable[[Optimizer], Any]

DEFAULT_OPTIM: Optim = partial(fused_optimizer, Adam, {"lr": 1e-3})
DEFAULT_BATCH_SIZE = 128


@dataclass(frozen=True)
class FitResult:
    """What :func:`fit` did.

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
    num_data: int | None = None,
    optim: Optim = DEFAULT_OPTIM,
    scheduler: Scheduler | None = None,
    scheduler_interval: str = "epoch",
    loss: RadialELBO | None = None,
    validation: Any = None,
    patience: int | None = None,
    pretrain_epochs: int = 0,
    accumulate: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    compile: bool = False,
    seed: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    callback: Callable[[Record], Any] | None = None,
    progress: bool = True,
) -> FitResult:
    r"""Train a guide, and what the model has of its own to train, on mini-batches.

    Each epoch passes over the data once in a random order. With ``checkpoint`` the run can be killed at any moment:
    the same call resumes it and ends, bit for bit on one machine, where an undisturbed run does. More ``epochs`` and
    another ``patience`` may be given then, and another learning rate of the optimizer, or of each group of parameters
    that it has, of which a warning says so.

    Scales can have a rate of their own: ``optim=pyro.optim.Adam(lambda name: {"lr": 1e-2 if "scales" in name else
    3e-3})``. It is the rate of :math:`\rho`, of which softplus makes the scale, :math:`\sigma = \log(1 + e^\rho)`; with
    :math:`d\sigma / d\rho = 1 - e^{-\sigma}`, a step r in it changes the scale by

    .. math:: \Delta \log \sigma \approx r \, \frac{1 - e^{-\sigma}}{\sigma},

    which is r where :math:`\sigma \ll 1`, 0.63 r at 1 and 0.32 r at 3: larger scales move less, as a radial guide has,
    :math:`\sqrt D` times the marginal standard deviation. A rate of 1e-2 for :math:`\log \sigma` is therefore one of
    :math:`10^{-2} \, \sigma / (1 - e^{-\sigma})` here.

    Started by ``torchrun``, or where ``torch.distributed`` is initialized, all processes train the one guide together:
    each calls ``fit`` with the same arguments, whose batches its rows are a part of, and gradients are averaged over
    all rows. The first process validates, writes the checkpoint, shows the progress and calls the callback, whose
    answer all obey; the noise of each is its own; at the end the models and guides of all are the same. Make model and
    guide on the process's own device, in each from the same seed or file. Of a :class:`~pyro_radial.FunctionalELBO`
    each process has measurement points of its own, whose divergences are averaged. Batch norm in train mode normalizes
    the rows of each process, and the running statistics are those of the first.

    Modules are trained in the mode that they are in. What a model *function* makes with ``pyro.param`` is trained too,
    but buffers and modes of modules that it uses are out of reach: let the model be an ``nn.Module`` to have batch norm
    or dropout resumed and evaluated right.

    :param model: a Pyro model ``model(x, y)`` whose likelihood scales a mini-batch, such as
        :class:`~pyro_radial.nn.SupervisedModel`.
    :param guide: its guide, an ``nn.Module`` such as :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param data: ``(x, y)``, x a tensor, or a tuple or a dict of tensors; ``(x1, x2, ..., y)``, which is
        ``((x1, x2, ...), y)``; a map-style torch ``Dataset`` of such items; or a ``DataLoader`` of one, of which the
        dataset, the ``collate_fn`` and the ``batch_size`` are used. Arrays of NumPy are tensors, floating-point ones
        of the network's dtype.
    :param int epochs: passes over the data, those of ``pretrain_epochs`` included.
    :param int batch_size: rows in one optimizer step, by default those of a ``DataLoader``'s batch, else 128; the last
        batch of an epoch may be smaller. With several processes, the rows of each.
    :param int num_data: N, the number that the plate around the observations stands for: by default the rows of
        ``data``, which a likelihood made without ``num_data`` then takes. Give it where the rows are only a part of
        the data, such as a subset that stands for the whole.
    :param optim: a function from parameters to a torch optimizer, or a Pyro optimizer such as
        ``pyro.optim.Adam({"lr": 1e-3})``, whose settings may be a function of a parameter's name, as under ``SVI``: the
        name in Pyro's store, such as "AutoRadial.scales.0.weight", or, of what is not there, in the guide or model.
        Each of its settings is a group of one torch optimizer. The default is Adam at 1e-3.
    :param scheduler: of the learning rate: a function from the optimizer to a torch scheduler, such as
        ``partial(torch.optim.lr_scheduler.StepLR, step_size=10)``, or one of Pyro's, which brings its own optimizer in
        the place of ``optim``. It takes a step after each epoch, ``ReduceLROnPlateau`` on the validation or, without
        one, on the loss, changes the rates of all groups, and is part of a checkpoint.
    :param str scheduler_interval: "epoch", or "step" for a step of the scheduler after each of the optimizer. A rate
        that falls to zero over a run is ``partial(CosineAnnealingLR, T_max=epochs * steps)``, with ``steps`` in an
        epoch, ceil(rows / ``batch_size``); with several processes ``batch_size`` counts once for each. Not for
        ``ReduceLROnPlateau``.
    :param loss: a :class:`~pyro_radial.infer.elbo.RadialELBO` or another loss with its ``terms`` and ``step``; a
        schedule of its ``kl_weight`` gets the number of optimizer steps taken so far, and where it has a
        ``function_site``, as :class:`~pyro_radial.FunctionalELBO` has, validation predicts at that site.
    :param validation: data as above; after each epoch its negative log predictive density per datum is measured
        with 16 draws, and at the end the guide and model get the parameters of the best epoch. Needs a model with
        an attribute ``likelihood``.
    :param int patience: stop after so many epochs without a better validation; needs ``validation``.
    :param int pretrain_epochs: first epochs that train the means on the likelihood alone, without noise (Farquhar,
        Osborne and Gal 2020, appendix D).
    :param int accumulate: parts that each batch is split into, for less memory; all parts see the same draw of the
        weights, so that their gradients sum to that of the whole batch (not through batch norm in train mode or
        dropout, whose noise is that of each part). Under :func:`~pyro_radial.poutine.local_reparameterization` the
        first rows of all parts have the same noise, the second ones, and so on: in expectation the gradient is
        the same.
    :param float clip_norm: the most that the norm of all gradients together may be, as in
        ``torch.nn.utils.clip_grad_norm_``, for a loss in nats for the whole data set; no clipping by default.
    :param torch.dtype autocast: what matrix products and convolutions of the model are computed in, under
        ``torch.autocast``: ``torch.bfloat16``, or ``torch.float16``, whose losses a ``GradScaler`` then scales. The
        KL, densities and the validation are computed in full precision.
    :param bool compile: whether to replay compiled graphs of the loss, as :class:`~pyro_radial.CompiledSVI` does: a
        step takes a fraction of the time, and the first ones some seconds for each shape of batch. What a graph cannot
        see is said there. Not with ``torch.float16``, whose losses are scaled within.
    :param int seed: seeds Pyro and torch at the start of a new run.
    :param checkpoint: a file to write the state to and to resume from if it exists. What modules keep in their state
        besides tensors (``get_extra_state``) must be numbers, text, and lists and dicts of these.
    :param int checkpoint_every: optimizer steps between checkpoints, with one at the end; by default one per epoch.
    :param callback: called with the record of each epoch; a true return value ends the training.
    :param bool progress: whether to show a progress bar.
    :returns: a :class:`FitResult`.
    :raises ValueError: naming the argument, for values out of range, NaN or infinity in the data, a ``num_data`` of the
        likelihood or size of the plate that is not the data's, or a checkpoint that is damaged, from another model,
        from other data, settings or number of processes, or being written by another run; for more processes than
        rows, or processes that do not train the same.
    :raises RuntimeError: where another process has ended, or does not answer for half an hour. What else is raised in
        one process is raised in all.
    :raises OSError: before the first step, where a checkpoint cannot be written.
    :raises FloatingPointError: naming the term and site, when a loss is NaN or infinite; no step is taken on it and the
        last checkpoint is kept.

    Example::

        >>> import torch
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(64, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian())
        >>> result = fit(model, AutoRadial(model), (x, x.sum(-1, keepdim=True)), epochs=3, seed=0, progress=False)
        >>> len(result.history), sorted(result.history[0])
        (3, ['epoch', 'kl', 'kl_weight', 'loss', 'nll'])
    """
    with ExitStack() as stack:
        processes = stack.enter_context(joined(device_of(guide, model)))
        with processes.together():
            counts = {"epochs": epochs, "accumulate": accumulate}
            optional = {
                "patience": patience,
                "checkpoint_every": checkpoint_every,
                "pretrain_epochs": pretrain_epochs or None,
            }
            optional |= {"batch_size": batch_size, "num_data": num_data}
            for name, value in (counts | {k: v for k, v in optional.items() if v is not None}).items():
                positive_count(f"fit: {name}", value)
            seed = None if seed is None else non_negative_integer("fit: seed", seed)
            clip_norm = None if clip_norm is None else positive_float("fit: clip_norm", clip_norm)
            if autocast not in (None, torch.bfloat16, torch.float16):
                raise ValueError(f"fit: autocast must be torch.bfloat16 or torch.float16, got {autocast!r}")
            if compile and autocast is torch.float16:
                raise ValueError("fit: compile must be False with autocast=torch.float16, got True; use torch.bfloat16")
            if not isinstance(guide, nn.Module):
                raise ValueError(f"fit: guide must be an nn.Module such as AutoRadial, got {type(guide).__name__}")
            if scheduler_interval not in ("epoch", "step"):
                raise ValueError(f"fit: scheduler_interval must be 'epoch' or 'step', got {scheduler_interval!r}")
            if scheduler_interval == "step" and scheduler is None:
                raise ValueError("fit: scheduler_interval must be left out without a scheduler, got 'step'")
            if patience is not None and validation is None:
                raise ValueError(
                    f"fit: validation must be given with patience, got patience={patience} and no validation"
                )
            if validation is not None and getattr(model, "likelihood", None) is None:
                raise ValueError(
                    "fit: model must have an attribute `likelihood` for validation, as SupervisedModel has, got "
                    f"{type(model).__name__} without one"
                )
            loss = RadialELBO() if loss is None else loss
            if not isinstance(loss, ELBO) or not hasattr(type(loss), "terms"):
                raise ValueError(f"fit: loss must keep its terms, as RadialELBO does, got {type(loss).__name__}")
            dtype = dtype_of(guide, model)
            rows = Rows(data, "data", dtype)
            validation_rows = None if validation is None else Rows(validation, "validation", dtype)
            num_data = len(rows) if num_data is None else int(num_data)
            set_num_data(model, num_data, "fit")
            if processes.size > len(rows):
                raise ValueError(
                    f"fit: data must have at least one row for each process, got {len(rows)} rows for "
                    f"{processes.size} processes"
                )
            if seed is not None:
                pyro.set_rng_seed(seed)
        shuffle_seed = seed if seed is not None else processes.from_first(lambda: int(torch.randint(2**31, ())))
        path = None if checkpoint is None else Path(checkpoint)
        with processes.together():
            make_optimizer, make_scheduler = _constructors(optim, scheduler)
            run = TrainingRun(
                model,
                guide,
                loss,
                rows,
                processes=processes,
                shuffle_seed=shuffle_seed,
                batch_size=batch_size or rows.batch_size or DEFAULT_BATCH_SIZE,
                accumulate=accumulate,
                pretrain_epochs=pretrain_epochs,
                make_optimizer=make_optimizer,
                make_scheduler=make_scheduler,
                scheduler_interval=scheduler_interval,
                seed=seed,
                validation=validation_rows,
                patience=patience,
                num_data=num_data,
                clip_norm=clip_norm,
                autocast=autocast,
                compile=compile,
            )
            stack.enter_context(sole_writer(path if processes.is_first else None))
        run.begin(path, epochs, checkpoint_every=checkpoint_every)
        _train(run, path, epochs, checkpoint_every, callback, progress and processes.is_first)
        run.end()
    return FitResult(run.history, run.best_epoch, run.stopped)


def _train(
    run: TrainingRun,
    path: Path | None,
    epochs: int,
    checkpoint_every: int | None,
    callback: Callable[[Record], Any] | None,
    progress: bool,
) -> None:
    """The rest of a run, with progress and checkpoints."""
    total = epochs * run.steps_per_epoch
    bar = tqdm(total=total, initial=min(run.steps_done, total), desc="fit", unit="step", disable=not progress)
    with bar:
        while run.epoch < epochs and not run.stopped:
            for _ in range(run.step_in_epoch, run.steps_per_epoch):
                run.step()
                bar.update()
                bar.set_postfix(run.shown(), refresh=False)
                if path is not None and checkpoint_every and run.steps_done % checkpoint_every == 0:
                    run.save(path)
            record = run.end_epoch()
            run.ended = run.processes.from_first(partial(_ends, callback, record))
            run.take_over()
            if path is not None and (not checkpoint_every or run.stopped or run.epoch == epochs):
                run.save(path)


def _ends(callback: Callable[[Record], Any] | None, record: Record) -> bool:
    """Whether the callback ends the training after an epoch."""
    return callback is not None and bool(callback(dict(record)))


def _constructors(
    optim: Any, scheduler: Any
) -> tuple[Callable[[Mapping[str, Tensor]], Optimizer], Callable[[Optimizer], Any] | None]:
    """From named parameters to their optimizer, and from that to its scheduler."""
    if not isinstance(scheduler, PyroLRScheduler):
        if scheduler is not None and (isinstance(scheduler, LRScheduler) or not callable(scheduler)):
            raise ValueError(
                "fit: scheduler must be a function from an optimizer to a torch scheduler, such as "
                "partial(torch.optim.lr_scheduler.StepLR, step_size=10), or a Pyro scheduler, got "
                f"{type(scheduler).__name__}"
            )
        return _constructor(optim), scheduler
    if optim is not DEFAULT_OPTIM:
        raise ValueError(
            f"fit: optim must be left out with a Pyro scheduler, which has its own, got {type(optim).__name__}"
        )
    if scheduler.pt_clip_args:
        raise ValueError("fit: scheduler must clip no parameter by itself, got clip_args; pass clip_norm to fit")
    return partial(joint_optimizer, scheduler, who="fit"), partial(
        scheduler.pt_scheduler_constructor, **scheduler.kwargs
    )


def _constructor(optim: Any) -> Callable[[Mapping[str, Tensor]], Optimizer]:
    """From named parameters to one torch optimizer of them all."""
    if not isinstance(optim, PyroOptim):
        if isinstance(optim, Optimizer) or not callable(optim):
            raise ValueError(
                "fit: optim must be a function from parameters to a torch optimizer, such as partial(torch.optim.Adam, "
                f"lr=1e-3), or a Pyro optimizer, got {type(optim).__name__}"
            )
        return lambda parameters: optim(list(parameters.values()))
    if optim.pt_clip_args or isinstance(optim, PyroLRScheduler):
        raise ValueError(
            "fit: optim must clip no parameter by itself and have no learning rate schedule, got "
            f"{type(optim).__name__}{' with clip_args' if optim.pt_clip_args else ''}; pass clip_norm and a scheduler "
            "to fit"
        )
    return partial(joint_optimizer, optim, who="fit")
