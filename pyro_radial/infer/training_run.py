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
from pyro_radial.infer.checkpoint import State, check_data, check_settings, load_checkpoint, save_checkpoint
from pyro_radial.infer.data import Rows, device_of, num_rows
from pyro_radial.infer.data_fingerprint import data_fingerprint
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.fingerprint import described
from pyro_radial.infer.not_finite import check_parameters, finite_loss, not_finite_error
from pyro_radial.infer.random_state import rng_state, set_rng_state
from pyro_radial.infer.trained import Trained
from pyro_radial.infer.validation import validation_nll
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine import mean_only

__all__ = ["Record", "TrainingRun"]

Record = dict[str, float]

RESUMED = ("epoch", "step_in_epoch", "best_epoch", "sums", "kl_weight", "history", "stopped", "best")
SAVED = (*RESUMED, "settings", "data", "shuffle_seed", "optimizer", "rng", "guide", "model", "loose")


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
    ) -> None:
        self.loss, self.accumulate, self.pretrain_epochs = loss, accumulate, pretrain_epochs
        self.validation, self.patience = validation, patience
        shuffle_seed = seed if seed is not None else int(torch.randint(2**31, ()))
        self.batches = Batches(rows, batch_size, shuffle_seed, device_of(guide, model))
        self.trained = Trained(model, guide, self.batches.first_rows())
        self.parameters = self.trained.parameters(loss)
        self.optimizer = make_optimizer([p for p in self.parameters.values() if p.requires_grad])
        self.pretraining_loss = RadialELBO(kl_weight=0.0)
        kl_weight = getattr(loss, "kl_weight", None)
        self.settings = {
            "guide": type(guide).__name__,
            "likelihood": type(getattr(model, "likelihood", None)).__name__,
            "loss": type(loss).__name__,
            "kl_weight": described(kl_weight)[""],
            "num_particles": loss.num_particles,
            "num_data": len(rows),
            "batch_size": batch_size,
            "accumulate": accumulate,
            "pretrain_epochs": pretrain_epochs,
            "seed": seed,
            "validation": validation is not None,
            "optimizer": f"{type(self.optimizer).__name__}({self.optimizer.defaults})",
        }
        self.data: dict[str, dict[str, Any]] = {}
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
        self.optimizer.step()
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
            (value * share).backward()
            terms = loss.terms.per_datum()
            for name, term in (("loss", terms.loss), ("nll", terms.negative_log_likelihood), ("kl", terms.kl)):
                totals[name] += float(term) * share
        self.kl_weight = loss.terms.kl_weight
        return totals

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
            if self.best is None or value < self.history[self.best_epoch]["validation_nll"]:
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
        """Give the guide and the model the parameters of the best validation."""
        if self.best is not None:
            self.trained.load(self.best)

    def identify(self) -> None:
        """Take down what the run is of, before it changes: what a checkpoint of it must agree with."""
        self.settings |= {
            "model": described(self.trained.model),
            "loss settings": described(self.loss),
        }
        rows = {"data": self.batches.rows, "validation data": self.validation}
        self.data = {name: data_fingerprint(r, self.device) for name, r in rows.items() if r is not None}

    def save(self, path: Path) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        check_parameters(self.parameters, self._where)
        state = {name: getattr(self, name) for name in (*RESUMED, "settings", "data")}
        state |= {"shuffle_seed": self.batches.seed, "optimizer": self.optimizer.state_dict()}
        save_checkpoint(path, state | {"rng": rng_state(self.device), **self.trained.copy_of_state()})

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of this very run; what is refused has changed nothing."""
        state = load_checkpoint(path, self.device, needed=SAVED)
        self.trained.check(path, state)
        check_settings(path, state["settings"], self.settings)
        for name, known in self.data.items():
            check_data(path, state["data"][name], known, name)
        self.optimizer.load_state_dict(state["optimizer"])
        self.trained.load(state)
        for name in RESUMED:
            setattr(self, name, state[name])
        self.batches.seed = state["shuffle_seed"]
        set_rng_state(state["rng"], self.device)

    def shown(self) -> dict[str, str]:
        """The latest terms, for the progress bar."""
        return {name: f"{self.latest[name]:.4g}" for name in ("nll", "kl")}
