# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One training run, step by step, with everything that a checkpoint of it must hold."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_radial.infer.checkpoint import (
    State,
    check_settings,
    first_not_finite,
    load_module,
    rng_state,
    save_checkpoint,
    set_rng_state,
)
from pyro_radial.infer.data import Inputs, Rows, device_of, evaluating, move, num_rows, take
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.predict import predict
from pyro_radial.poutine import mean_only

Optim = PyroOptim | Callable[[Iterable[nn.Parameter]], Optimizer]
Record = dict[str, float]

VALIDATION_SEED = 0
VALIDATION_SAMPLES = 16
RESUMED = ("epoch", "step_in_epoch", "best_epoch", "sums", "history", "stopped", "best", "shuffle_seed")


class TrainingRun:
    """The state of one training run: everything that a checkpoint holds."""

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        loss: RadialELBO,
        rows: Rows,
        batch_size: int,
        accumulate: int,
        pretrain_epochs: int,
        optim: Optim,
        seed: int | None,
        validation: Rows | None,
        patience: int | None,
    ) -> None:
        self.model, self.guide, self.loss, self.rows = model, guide, loss, rows
        self.batch_size, self.accumulate, self.pretrain_epochs = batch_size, accumulate, pretrain_epochs
        self.validation, self.patience = validation, patience
        self.device = device_of(guide, model)
        self.steps_per_epoch = -(-len(rows) // batch_size)
        self.shuffle_seed = seed if seed is not None else int(torch.randint(2**31, ()))
        _make_parameters(model, guide, self._to_device(rows.take(torch.arange(min(2, len(rows))))))
        self.pretraining_loss = RadialELBO(kl_weight=0.0)
        parameters = [p for p in self._module(loss).parameters() if p.requires_grad]
        self.optimizer = _make_optimizer(optim, parameters)
        self.settings = {
            "num_data": len(rows),
            "batch_size": batch_size,
            "accumulate": accumulate,
            "pretrain_epochs": pretrain_epochs,
            "seed": seed,
            "validation": validation is not None,
            "optimizer": type(self.optimizer).__name__,
        }
        self.epoch = self.step_in_epoch = self.best_epoch = 0
        self.sums = {"loss": 0.0, "nll": 0.0, "kl": 0.0}
        self.history: list[Record] = []
        self.stopped = False
        self.best: State | None = None
        self.order: Tensor | None = None
        self.latest: Record = {}
        self.kl_weight = 1.0

    @property
    def steps_done(self) -> int:
        """Optimiser steps since the start of the run, across resumes."""
        return self.epoch * self.steps_per_epoch + self.step_in_epoch

    def _module(self, loss: ELBO) -> nn.Module:
        return loss(self.model, self.guide)  # type: ignore[arg-type]

    def _to_device(self, pair: tuple[Inputs, Inputs]) -> tuple[Any, Any]:
        return move(pair[0], self.device), move(pair[1], self.device)

    def step(self) -> None:
        """One optimiser step on the next batch."""
        if self.step_in_epoch == 0 or self.order is None:
            generator = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            self.order = torch.randperm(len(self.rows), generator=generator)
        index = self.order[self.step_in_epoch * self.batch_size : (self.step_in_epoch + 1) * self.batch_size]
        batch = self._to_device(self.rows.take(index))
        pretraining = self.epoch < self.pretrain_epochs
        loss = self.pretraining_loss if pretraining else self.loss
        # A schedule of the KL weight counts optimiser steps, however a batch is split.
        loss.step = self.steps_done
        self.optimizer.zero_grad()
        terms = self._accumulate_gradients(loss, batch, pretraining)
        self.optimizer.step()
        for name, value in terms.items():
            self.sums[name] += value * len(index) / len(self.rows)
        self.latest = terms
        self.step_in_epoch += 1

    def _accumulate_gradients(self, loss: RadialELBO, batch: tuple[Any, Any], pretraining: bool) -> Record:
        """Gradients of the batch in parts that share their noise; the mean terms, in nats per datum."""
        module, state = self._module(loss), rng_state(self.device)
        size, step = num_rows(batch[0]), loss.step
        totals = dict.fromkeys(self.sums, 0.0)
        for part in torch.arange(size).chunk(self.accumulate):
            set_rng_state(state, self.device)
            loss.step = step
            share = len(part) / size
            inputs = take(batch[0], part), take(batch[1], part)
            with mean_only() if pretraining else nullcontext():
                value = self._finite_loss(module, loss, inputs)
            (value * share).backward()
            terms = loss.terms.per_datum()
            for name, term in (("loss", terms.loss), ("nll", terms.negative_log_likelihood), ("kl", terms.kl)):
                totals[name] += float(term) * share
        self.kl_weight = loss.terms.kl_weight
        return totals

    def _finite_loss(self, module: nn.Module, loss: RadialELBO, inputs: tuple[Any, Any]) -> Tensor:
        where = f"in epoch {self.epoch}, step {self.step_in_epoch}"
        try:
            value = module(*inputs)
        except ValueError as error:
            # Validation stops at the first value that is not finite; without it the terms say where that came from.
            broken = first_not_finite(module.named_parameters())
            culprits = [f"parameter {broken}"] if broken else _terms_not_finite(module, loss, inputs)
            if not culprits:
                raise
            raise FloatingPointError(f"fit: {', '.join(culprits)} is not finite {where}") from error
        if not bool(torch.isfinite(value)):
            raise FloatingPointError(f"fit: {', '.join(loss.terms.not_finite())} is not finite {where}")
        return value

    def end_epoch(self) -> Record:
        """Close the epoch's record, measure the validation, and say whether patience has run out."""
        record = {"epoch": float(self.epoch), **self.sums, "kl_weight": float(self.kl_weight)}
        if self.validation is not None:
            record["validation_nll"] = self._validate(self.validation)
        self.history.append(record)
        if self.validation is None:
            self.best_epoch = self.epoch
        elif record["validation_nll"] <= min(r["validation_nll"] for r in self.history):
            self.best_epoch, self.best = self.epoch, self._parameters()
        self.stopped = self.patience is not None and self.epoch - self.best_epoch >= self.patience
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.sums = dict.fromkeys(self.sums, 0.0)
        return record

    def _validate(self, validation: Rows) -> float:
        """Negative log predictive density per datum, from draws that leave the training's own noise alone."""
        x, y = validation.all()
        state = rng_state(self.device)
        torch.manual_seed(VALIDATION_SEED)
        density = predict(self.model, self.guide, x, num_samples=VALIDATION_SAMPLES).log_prob(y)  # type: ignore[arg-type]
        set_rng_state(state, self.device)
        return -float(density.mean())

    def _parameters(self) -> State:
        modules = {"guide": self.guide, "model": self.model}
        return {
            role: {name: value.detach().clone() for name, value in module.state_dict().items()}
            for role, module in modules.items()
            if isinstance(module, nn.Module)
        }

    def restore_best(self) -> None:
        """Give the guide and the model the parameters of the best validation."""
        if self.best is not None:
            self.guide.load_state_dict(self.best["guide"])
            if isinstance(self.model, nn.Module):
                self.model.load_state_dict(self.best["model"])

    def save(self, path: Path) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        broken = first_not_finite(self._module(self.loss).named_parameters())
        if broken is not None:
            raise FloatingPointError(f"fit: parameter {broken} is not finite in epoch {self.epoch}")
        state = {name: getattr(self, name) for name in (*RESUMED, "settings")}
        state |= {"optimizer": self.optimizer.state_dict(), "rng": rng_state(self.device), **self._parameters()}
        save_checkpoint(path, state)

    def load(self, path: Path, state: State) -> None:
        """Go on from a checkpoint of this very run."""
        load_module(path, "guide", self.guide, state["guide"])
        if isinstance(self.model, nn.Module):
            load_module(path, "model", self.model, state["model"])
        check_settings(path, state["settings"], self.settings)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in RESUMED:
            setattr(self, name, state[name])
        set_rng_state(state["rng"], self.device)

    def shown(self) -> dict[str, str]:
        """The latest terms, for the progress bar."""
        return {name: f"{self.latest[name]:.4g}" for name in ("nll", "kl")}


def _make_parameters(model: Any, guide: nn.Module, batch: tuple[Any, Any]) -> None:
    """Run a lazy guide once, so that an optimiser finds its parameters; nothing else may change."""
    with evaluating(model, guide), torch.no_grad(), pyro.poutine.block():
        getattr(guide, "setup", guide)(*batch)


def _make_optimizer(optim: Optim, parameters: list[nn.Parameter]) -> Optimizer:
    if not isinstance(optim, PyroOptim):
        return optim(parameters)
    if not isinstance(optim.pt_optim_args, dict) or optim.pt_clip_args:
        raise ValueError(
            "fit: optim must have one setting for all parameters and no clipping; pass a function from parameters "
            "to a torch optimiser instead"
        )
    return optim.pt_optim_constructor(parameters, **optim.pt_optim_args)  # type: ignore[operator]


def _terms_not_finite(module: nn.Module, loss: RadialELBO, inputs: tuple[Any, Any]) -> list[str]:
    with pyro.validation_enabled(False), torch.no_grad():
        module(*inputs)
    return loss.terms.not_finite()
