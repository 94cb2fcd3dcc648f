# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One training run, step by step, with everything that a checkpoint of it must hold."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_radial.infer.batches import Batches, parts
from pyro_radial.infer.checkpoint import State, check_settings, save_checkpoint
from pyro_radial.infer.data import Rows, device_of, num_rows
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.gradient_step import GradientStep
from pyro_radial.infer.loss_terms import LossTerms
from pyro_radial.infer.not_finite import check_parameters, finite_loss, not_finite_error
from pyro_radial.infer.random_state import rng_state, set_rng_state
from pyro_radial.infer.trained import Trained
from pyro_radial.infer.validation import validation_nll
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine import mean_only

__all__ = ["Record", "TrainingRun"]

Record = dict[str, float]

RESUMED = ("epoch", "step_in_epoch", "best_epoch", "sums", "kl_weight", "history", "stopped", "best")


class TrainingRun:
    """The state of one training run; its parameters are those of :func:`~pyro_radial.fit`, checked.

    :param make_optimizer: a function from parameters to a torch optimizer.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        loss: RadialELBO,
        rows: Rows,
        *,
        batch_size: int,
        accumulate: int,
        pretrain_epochs: int,
        make_optimizer: Callable[[list[Tensor]], Optimizer],
        seed: int | None,
        validation: Rows | None,
        patience: int | None,
        num_data: int,
        clip_norm: float | None,
        autocast: torch.dtype | None,
    ) -> None:
        self.loss, self.accumulate, self.pretrain_epochs = loss, accumulate, pretrain_epochs
        self.validation, self.patience, self.num_data = validation, patience, num_data
        shuffle_seed = seed if seed is not None else int(torch.randint(2**31, ()))
        self.batches = Batches(rows, batch_size, shuffle_seed, device_of(guide, model))
        self.trained = Trained(model, guide, self.batches.first_rows(), autocast)
        self.parameters = self.trained.parameters(loss)
        self.optimizer = make_optimizer([p for p in self.parameters.values() if p.requires_grad])
        self.gradient_step = GradientStep(self.optimizer, clip_norm, autocast, self.device)
        self.pretraining_loss = RadialELBO(kl_weight=0.0)
        kl_weight = getattr(loss, "kl_weight", None)
        self.settings = {
            "guide": type(guide).__name__,
            "likelihood": type(getattr(model, "likelihood", None)).__name__,
            "loss": type(loss).__name__,
            "kl_weight": "a schedule" if callable(kl_weight) else kl_weight,
            "num_particles": loss.num_particles,
            "num_data": num_data,
            "rows": len(rows),
            "batch_size": batch_size,
            "accumulate": accumulate,
            "pretrain_epochs": pretrain_epochs,
            "seed": seed,
            "validation": validation is not None,
            "optimizer": f"{type(self.optimizer).__name__}({_without_rate(self.optimizer.defaults)})",
            "clip_norm": clip_norm,
            "autocast": str(autocast),
        }
        self.epoch = self.step_in_epoch = self.best_epoch = 0
        self.sums = {"loss": 0.0, "nll": 0.0, "kl": 0.0}
        self.history: list[Record] = []
        self.stopped = False
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
        batch = self.batches.get(self.epoch, self.step_in_epoch)
        self.optimizer.zero_grad()
        self.latest = self._accumulate_gradients(batch)
        self.gradient_step.take()
        for name, value in self.latest.items():
            self.sums[name] += value * num_rows(batch[0]) / len(self.batches.rows)
        self.step_in_epoch += 1

    def _accumulate_gradients(self, batch: tuple[Any, Any]) -> Record:
        """Gradients of the batch in parts that share their noise; the mean terms, in nats per datum."""
        pretraining = self.epoch < self.pretrain_epochs
        loss = self.pretraining_loss if pretraining else self.loss
        noise = rng_state(self.device)
        totals = dict.fromkeys(self.sums, 0.0)
        for part, share in parts(batch, self.accumulate):
            # A schedule of the KL weight counts optimizer steps, however a batch is split.
            loss.step = self.steps_done
            with mean_only() if pretraining else nullcontext():
                value = finite_loss(self.trained, loss, part, noise, self._where)
            self._check_num_data(loss.terms)
            self.gradient_step.backward(value * share)
            terms = loss.terms.per_datum()
            for name, term in (("loss", terms.loss), ("nll", terms.negative_log_likelihood), ("kl", terms.kl)):
                totals[name] += float(term) * share
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
        """Close the epoch's record, measure the validation, and say whether patience has run out.

        :raises FloatingPointError: if a parameter or the validation is not finite.
        """
        check_parameters(self.parameters, self._where)
        record = {"epoch": self.epoch, **self.sums, "kl_weight": self.kl_weight}
        if self.validation is None:
            self.best_epoch = self.epoch
        else:
            value = record["validation_nll"] = self._validate(self.validation)
            if math.isfinite(value) and (self.best is None or value < self.history[self.best_epoch]["validation_nll"]):
                self.best_epoch, self.best = self.epoch, self.trained.copy_of_state()
        self.history.append(record)
        self.stopped = self.patience is not None and self.epoch - self.best_epoch >= self.patience
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.sums = dict.fromkeys(self.sums, 0.0)
        return record

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
        elif self.epoch:
            self.best_epoch = self.epoch - 1

    def save(self, path: Path) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        check_parameters(self.parameters, self._where)
        state = {name: getattr(self, name) for name in (*RESUMED, "settings")}
        state |= self.gradient_step.state()
        state |= {"shuffle_seed": self.batches.seed, "optimizer": self.optimizer.state_dict()}
        save_checkpoint(path, state | {"rng": rng_state(self.device), **self.trained.copy_of_state()})

    def load(self, path: Path, state: State) -> None:
        """Go on from a checkpoint of this very run; what is refused has changed nothing."""
        self.trained.check(path, state)
        check_settings(path, state["settings"], self.settings)
        self.trained.load(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.gradient_step.load(path, state)
        for name in RESUMED:
            setattr(self, name, state[name])
        self.batches.seed = state["shuffle_seed"]
        set_rng_state(state["rng"], self.device)

    def shown(self) -> dict[str, str]:
        """The latest terms, for the progress bar."""
        return {name: f"{self.latest[name]:.4g}" for name in ("nll", "kl")}


def _without_rate(settings: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's settings but for the learning rate, which may change between resumes."""
    return {name: value for name, value in settings.items() if name != "lr"}
