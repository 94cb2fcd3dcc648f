# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""From the losses of a batch to one step of a torch optimizer: loss scaling, clipping, and a rate that is changed."""

import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial.infer.training.optimizers import check_steps_alone

__all__ = ["GradientStep", "autocasting"]


class GradientStep:
    """The steps of one optimizer.

    :param Optimizer optimizer: the optimizer.
    :param float clip_norm: the most that the norm of all gradients together may be; None for no clipping.
    :param torch.dtype autocast: the dtype that the model computes in; float16, whose gradients underflow, has its
        losses scaled by a ``GradScaler``.
    :param torch.device device: where the model computes.
    :raises ValueError: for an optimizer that cannot step on gradients alone.
    """

    def __init__(
        self, optimizer: Optimizer, clip_norm: float | None, autocast: torch.dtype | None, device: torch.device
    ) -> None:
        check_steps_alone(optimizer, "fit")
        self.optimizer, self.clip_norm = optimizer, clip_norm
        #: The setting of each group of parameters, whatever becomes of it; None where the optimizer has none.
        self.learning_rates = [_initial_rate(group) for group in optimizer.param_groups]
        self.scaler = torch.amp.GradScaler(device.type, enabled=autocast is torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        self.scaler.scale(loss).backward()

    def add(self, gradients: Iterable[tuple[Tensor, Tensor]], share: float) -> None:
        """Add gradients that are known, times a share."""
        for parameter, gradient in gradients:
            part = gradient if share == 1.0 else gradient * share
            parameter.grad = part if parameter.grad is None else parameter.grad + part

    def take(self) -> None:
        """One step; with scaled losses none, if a gradient has overflowed."""
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the optimizer's own state."""
        return {"learning_rates": self.learning_rates, "scaler": self.scaler.state_dict()}

    def load(self, path: Path, state: dict[str, Any], scheduler: Any = None) -> None:
        """Go on from a checkpoint at this run's learning rates.

        :param scheduler: of the rates; its state and the optimizer's are loaded already.
        """
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        before, now = state["learning_rates"], self.learning_rates
        if before == now:
            return
        warnings.warn(
            f"fit: checkpoint {path} was made with lr={_shown(before)}, the run goes on with lr={_shown(now)}",
            stacklevel=4,
        )
        for group, old, new in zip(self.optimizer.param_groups, before, now, strict=True):
            # A rate that has decayed has decayed as far from the new one.
            for name in {"lr", "initial_lr"} & group.keys():
                group[name] = group[name] * (new / old) if old else new
        _start_from(scheduler, [group.get("initial_lr") for group in self.optimizer.param_groups])


def _initial_rate(group: dict[str, Any]) -> float | None:
    """What a schedule starts from, where there is one."""
    rate = group.get("initial_lr", group.get("lr"))
    return None if rate is None else float(rate)


def _shown(rates: list[float | None]) -> str:
    return " and ".join(f"{rate:g}" for rate in rates if rate is not None)


def _start_from(scheduler: Any, rates: list[Any]) -> None:
    """Give a scheduler, and those that it is made of, the rates that it multiplies."""
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = list(rates)
    for part in getattr(scheduler, "_schedulers", ()):
        _start_from(part, rates)


def autocasting(model: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """The model under ``torch.autocast``; what is computed of its sites afterwards is in full precision.

    :param model: a Pyro model.
    :param torch.dtype dtype: what matrix products and convolutions are computed in.
    :param torch.device device: where.
    """

    @wraps(getattr(model, "forward", model))
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return model(*args, **kwargs)

    run.in_full_precision = model  # type: ignore[attr-defined]
    return run
