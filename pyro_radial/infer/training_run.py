# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One training run, step by step, with everything that a checkpoint of it must hold."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_radial.infer.checkpoint import (
    State,
    check_settings,
    check_shapes,
    first_not_finite,
    rng_state,
    save_checkpoint,
    seeded,
    set_rng_state,
)
from pyro_radial.infer.data import Inputs, Rows, device_of, evaluating, move, num_rows, take
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.predict import predict
from pyro_radial.poutine import mean_only

Record = dict[str, float]

VALIDATION_SEED = 0
VALIDATION_SAMPLES = 16
RESUMED = ("epoch", "step_in_epoch", "best_epoch", "sums", "kl_weight", "history", "stopped", "best", "shuffle_seed")


class TrainingRun:
    """The state of one training run: everything that a checkpoint holds."""

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
        self.model, self.guide, self.loss, self.rows = model, guide, loss, rows
        self.batch_size, self.accumulate, self.pretrain_epochs = batch_size, accumulate, pretrain_epochs
        self.validation, self.patience = validation, patience
        self.device = device_of(guide, model)
        self.steps_per_epoch = -(-len(rows) // batch_size)
        self.shuffle_seed = seed if seed is not None else int(torch.randint(2**31, ()))
        self.loose = _make_parameters(model, guide, self._to_device(rows.take(torch.arange(min(2, len(rows))))))
        self.trained = {**dict(self._module(loss).named_parameters()), **self.loose}
        self.optimizer = make_optimizer([p for p in self.trained.values() if p.requires_grad])
        self.pretraining_loss = RadialELBO(kl_weight=0.0)
        kl_weight = getattr(loss, "kl_weight", None)
        self.settings = {
            "guide": type(guide).__name__,
            "likelihood": type(getattr(model, "likelihood", None)).__name__,
            "loss": type(loss).__name__,
            "kl_weight": "a schedule" if callable(kl_weight) else kl_weight,
            "num_particles": loss.num_particles,
            "num_data": len(rows),
            "batch_size": batch_size,
            "accumulate": accumulate,
            "pretrain_epochs": pretrain_epochs,
            "seed": seed,
            "validation": validation is not None,
            "optimizer": f"{type(self.optimizer).__name__}({self.optimizer.defaults})",
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
        """Optimizer steps since the start of the run, across resumes."""
        return self.epoch * self.steps_per_epoch + self.step_in_epoch

    def _module(self, loss: ELBO) -> nn.Module:
        return loss(self.model, self.guide)  # type: ignore[arg-type]

    def _to_device(self, pair: tuple[Inputs, Inputs]) -> tuple[Any, Any]:
        return move(pair[0], self.device), move(pair[1], self.device)

    def step(self) -> None:
        """One optimizer step on the next batch."""
        if self.step_in_epoch == 0 or self.order is None:
            generator = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            self.order = torch.randperm(len(self.rows), generator=generator)
        index = self.order[self.step_in_epoch * self.batch_size : (self.step_in_epoch + 1) * self.batch_size]
        batch = self._to_device(self.rows.take(index))
        pretraining = self.epoch < self.pretrain_epochs
        loss = self.pretraining_loss if pretraining else self.loss
        # A schedule of the KL weight counts optimizer steps, however a batch is split.
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
                value = self._finite_loss(module, loss, inputs, state)
            (value * share).backward()
            terms = loss.terms.per_datum()
            for name, term in (("loss", terms.loss), ("nll", terms.negative_log_likelihood), ("kl", terms.kl)):
                totals[name] += float(term) * share
        self.kl_weight = loss.terms.kl_weight
        return totals

    def _finite_loss(self, module: nn.Module, loss: RadialELBO, inputs: tuple[Any, Any], noise: State) -> Tensor:
        try:
            value = module(*inputs)
        except ValueError as error:
            # Validation stops at the first value that is not finite; without it the terms say where that came from.
            self._check_parameters()
            set_rng_state(noise, self.device)
            with pyro.validation_enabled(False), torch.no_grad():
                drawn = poutine.trace(self.guide).get_trace(*inputs).iter_stochastic_nodes()
                site: Any = first_not_finite((name, node["value"]) for name, node in drawn)  # type: ignore[misc]
                if site is not None:
                    raise self._not_finite([f"a draw of site '{site}'"]) from error
                set_rng_state(noise, self.device)
                module(*inputs)
            broken = loss.terms.not_finite()
            if not broken:
                raise
            raise self._not_finite(broken) from error
        if not bool(torch.isfinite(value)):
            self._check_parameters()
            raise self._not_finite(loss.terms.not_finite() or ["the sum of the loss's terms"])
        return value

    def _check_parameters(self) -> None:
        broken = first_not_finite(self.trained.items())
        if broken is not None:
            raise self._not_finite([f"parameter {broken}"])

    def _not_finite(self, culprits: list[str]) -> FloatingPointError:
        where = f"in epoch {self.epoch}, step {self.step_in_epoch}"
        return FloatingPointError(f"fit: not finite {where}: {', '.join(culprits)}; try a smaller learning rate")

    def end_epoch(self) -> Record:
        """Close the epoch's record, measure the validation, and say whether patience has run out."""
        self._check_parameters()
        record = {"epoch": self.epoch, **self.sums, "kl_weight": self.kl_weight}
        if self.validation is None:
            self.best_epoch = self.epoch
        else:
            value = record["validation_nll"] = self._validate(self.validation)
            if self.best is None or value < self.history[self.best_epoch]["validation_nll"]:
                self.best_epoch, self.best = self.epoch, self._parameters()
        self.history.append(record)
        self.stopped = self.patience is not None and self.epoch - self.best_epoch >= self.patience
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.sums = dict.fromkeys(self.sums, 0.0)
        return record

    def _validate(self, validation: Rows) -> float:
        """Negative log predictive density per datum, from draws that leave the training's own noise alone."""
        x, y = validation.all()
        with seeded(VALIDATION_SEED, self.device):
            density = predict(self.model, self.guide, x, num_samples=VALIDATION_SAMPLES).log_prob(y)  # type: ignore[arg-type]
        if bool(density.isnan().any()):
            raise self._not_finite(["the log predictive density of the validation data"])
        return -float(density.mean())

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything trained, and buffers: of the guide, of the model and of neither module."""
        model = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        # By position, since names in Pyro's store count the instances made in a process.
        loose = {str(position): value for position, value in enumerate(self.loose.values())}
        return {"guide": self.guide.state_dict(), "model": model, "loose": loose}

    def _parameters(self) -> State:
        return {
            role: {name: value.detach().clone() for name, value in tensors.items()}
            for role, tensors in self._tensors().items()
        }

    @torch.no_grad()
    def _set_parameters(self, state: State) -> None:
        self.guide.load_state_dict(state["guide"])
        if isinstance(self.model, nn.Module):
            self.model.load_state_dict(state["model"])
        for name, value in self._tensors()["loose"].items():
            value.copy_(state["loose"][name])

    def restore_best(self) -> None:
        """Give the guide and the model the parameters of the best validation."""
        if self.best is not None:
            self._set_parameters(self.best)

    def save(self, path: Path) -> None:
        """Write everything that the rest of the run depends on; a broken state never replaces a good one."""
        self._check_parameters()
        state = {name: getattr(self, name) for name in (*RESUMED, "settings")}
        state |= {"optimizer": self.optimizer.state_dict(), "rng": rng_state(self.device), **self._parameters()}
        save_checkpoint(path, state)

    def load(self, path: Path, state: State) -> None:
        """Go on from a checkpoint of this very run; what is refused has changed nothing."""
        for role, tensors in self._tensors().items():
            check_shapes(path, "model" if role == "loose" else role, tensors, state[role])
        check_settings(path, state["settings"], self.settings)
        self._set_parameters(state)
        self.optimizer.load_state_dict(state["optimizer"])
        for name in RESUMED:
            setattr(self, name, state[name])
        set_rng_state(state["rng"], self.device)

    def shown(self) -> dict[str, str]:
        """The latest terms, for the progress bar."""
        return {name: f"{self.latest[name]:.4g}" for name in ("nll", "kl")}


def _make_parameters(model: Any, guide: nn.Module, batch: tuple[Any, Any]) -> dict[str, Tensor]:
    """Run everything once, so that an optimizer finds all parameters; returns those that are in neither module."""
    with evaluating(model, guide), torch.no_grad(), poutine.block():
        getattr(guide, "setup", guide)(*batch)
        with seeded(0, device_of(guide, model)), poutine.trace(param_only=True) as capture:
            drawn = poutine.trace(guide).get_trace(*batch)
            poutine.replay(model, trace=drawn)(*batch)
    modules = [module for module in (model, guide) if isinstance(module, nn.Module)]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    loose = {}
    for name, site in capture.trace.nodes.items():
        value: Any = site["value"]
        value = value.unconstrained() if hasattr(value, "unconstrained") else value
        # Under the name of a module's parameter Pyro's store may hold that of a namesake, which is not used.
        namesake = isinstance(value, nn.Parameter) and isinstance(model, nn.Module)
        if id(value) not in known and not namesake:
            loose[name] = value
    return loose
