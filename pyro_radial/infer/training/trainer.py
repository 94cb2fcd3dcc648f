# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The training step, and everything that it changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_radial._pyro.checks import load_states, states
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial.infer.elbo import LossTerms, TermsELBO
from pyro_radial.infer.training.checkpoint import Checkpoint, State, copied
from pyro_radial.infer.training.data import device_of, evaluating
from pyro_radial.infer.training.gradients import CompiledGradients, EagerGradients, Gradients, LossGradients
from pyro_radial.infer.training.natural_gradient import NaturalGradientOptimizer
from pyro_radial.infer.training.not_finite import check_parameters
from pyro_radial.infer.training.optimizers import DEFAULT_OPTIM, GuideOptim, Optim, initial_rates, make_optimizer

__all__ = ["OptimizerStep", "Trainer"]


class Trainer:
    """Train a model and a guide, one optimizer step at a time.

    ``gradients`` adds the gradients of a batch to the parameters, and ``take_step`` moves the parameters. Both are
    functions in attributes: wrap or replace them for gradients of another kind or another optimizer.

    :param model: a Pyro model ``model(x, y)``.
    :param guide: its guide.
    :param batch: inputs and targets to run both on once, so that all parameters exist.
    :param TermsELBO loss: a loss that keeps its terms; :class:`~pyro_radial.TermsELBO` by default.
    :param optim: a function from parameters to a torch optimizer, or a Pyro optimizer; Adam at 1e-3 by default.
    :param float clip_norm: the largest norm of all gradients together; None for no clipping.
    :param torch.dtype autocast: the dtype of the model's matrix products; None for its own dtype.
    :param int compile_rows: the number of rows of the batches whose graph is compiled; other batches replay a recorded
        graph. None runs the program as it is.
    :param bool step_in_graph: whether graphs may also take the optimizer's step, where it can be recorded, instead of
        ``take_step``. Nothing may then change the gradients that ``gradients`` adds.
    :param check: a function of the loss's terms that raises an error if they are wrong.
    :raises FloatingPointError: naming the first parameter that is NaN or infinite.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        batch: tuple[Any, Any],
        *,
        loss: TermsELBO | None = None,
        optim: Optim = DEFAULT_OPTIM,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        compile_rows: int | None = None,
        step_in_graph: bool = False,
        check: Callable[[LossTerms], None] | None = None,
    ) -> None:
        self.loss = TermsELBO() if loss is None else loss
        check_parameters(self.loss(model, guide).named_parameters(), 0)  # type: ignore[arg-type]
        self.model, self.guide, self.device = model, guide, device_of(guide, model)
        self._loose = _make_parameters(model, guide, batch)
        self._run = model if autocast is None else autocasting(model, autocast, self.device)
        self._check = check
        # Let the loss do what it does at its first call, such as find the nesting of plates; an error comes again in
        # the first step, with its number.
        with without_warnings(), evaluating(model, guide), torch.no_grad(), suppress(Exception):
            self.loss(self._run, guide)(*batch)  # type: ignore[arg-type]
        #: Everything that an optimizer can change, by name.
        self.parameters: dict[str, Tensor] = {**self.module_parameters(), **self._loose}
        self.optimizer = (
            optim.start(model, guide, batch, {}, compile_rows is not None)
            if isinstance(optim, GuideOptim)
            else make_optimizer(optim, {n: p for n, p in self.parameters.items() if p.requires_grad})
        )
        #: The learning rate of each group of parameters before any schedule.
        self.learning_rates = initial_rates(self.optimizer)
        # The gradients of float16 underflow unless the loss is scaled.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=autocast is torch.float16)
        alone = step_in_graph and clip_norm is None and not self.scaler.is_enabled()
        recorded = self.optimizer if alone and isinstance(self.optimizer, NaturalGradientOptimizer) else None
        self.gradients: Gradients = self.gradients_of(self.loss, compile_rows, recorded)
        self.take_step: Callable[[], None] = OptimizerStep(self.optimizer, self.scaler, clip_norm)
        #: Optimizer steps taken so far, across resumes.
        self.steps_done = 0

    def step(self, batch: Any) -> list[float]:
        """Take one optimizer step on inputs and targets, or what ``gradients`` takes.

        :returns: the loss, the negative log-likelihood and the KL in nats per datum.
        :raises FloatingPointError: naming what is NaN or infinite in the loss; no step is taken.
        """
        with without_warnings():
            self.optimizer.zero_grad()
            terms = self.gradients(batch, self.steps_done, 1.0)
            self.take_step()
        self.steps_done += 1
        return terms

    def gradients_of(
        self, loss: TermsELBO, compile_rows: int | None = None, optimizer: NaturalGradientOptimizer | None = None
    ) -> LossGradients:
        """Make the gradients of a loss of this model and guide; graphs of it take the steps of ``optimizer``."""
        arguments = (self._run, self.guide, loss, self.parameters, self._check)
        if compile_rows is None:
            return EagerGradients(*arguments, scaler=self.scaler)
        return CompiledGradients(*arguments, compile_rows=compile_rows, optimizer=optimizer)

    def modules(self) -> dict[str, State]:
        """The state of the guide, of the model, and of parameters outside both."""
        model = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        # By position, because names in Pyro's store count the instances that a process has made.
        loose: State = {str(position): value for position, value in enumerate(self._loose.values())}
        return {"guide": self.guide.state_dict(), "model": model, "loose": loose}

    def copy_of_modules(self) -> dict[str, State]:
        """Copy :meth:`modules`, so that further training does not change it."""
        return {role: copied(entries) for role, entries in self.modules().items()}

    @torch.no_grad()
    def load_modules(self, state: State) -> None:
        """Load what :meth:`copy_of_modules` returned."""
        self.guide.load_state_dict(state["guide"])
        if isinstance(self.model, nn.Module):
            self.model.load_state_dict(state["model"])
        for name, value in self.modules()["loose"].items():
            value.copy_(state["loose"][name])

    def check_entries(self, checkpoint: Checkpoint, state: State) -> None:
        """Raise a ``ValueError`` if a checkpoint's state is from another model or guide."""
        for role, entries in self.modules().items():
            checkpoint.check_entries("model" if role == "loose" else role, state[role], entries)

    def state_dict(self) -> State:
        """The state of everything that a step changes, except random numbers."""
        return {
            **self.copy_of_modules(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "learning_rates": self.learning_rates,
            "steps_done": self.steps_done,
            "loss": self.loss_state(),
        }

    def load_state_dict(self, state: State) -> None:
        """Load what :meth:`state_dict` returned; see :meth:`check_entries`."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        load_states(self._loss_parts, state["loss"])
        self.load_modules(state)
        self.steps_done = state["steps_done"]

    def loss_state(self) -> State:
        """The state of the loss, such as measurement points."""
        return states(self._loss_parts)

    @property
    def _loss_parts(self) -> dict[str, Any]:
        # Modules of a loss, such as a prior on functions, are not trained.
        return {name: part for name, part in vars(self.loss).items() if not isinstance(part, nn.Module)}

    def module_parameters(self) -> dict[str, Tensor]:
        """The parameters of the guide, the model and the loss, by name."""
        return dict(self.loss(self.model, self.guide).named_parameters())  # type: ignore[arg-type]


class OptimizerStep:
    """Take one step of a torch optimizer; after an overflow of the scaled loss, ``scaler`` skips it."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, clip_norm: float | None = None) -> None:
        self.optimizer, self.scaler, self.clip_norm = optimizer, scaler, clip_norm

    def __call__(self) -> None:
        """Take the step."""
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            if isinstance(self.optimizer, NaturalGradientOptimizer):
                parameters = self.optimizer.clipped()
            else:
                parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence Pyro's warnings about NaN in log-densities, because training stops with the name of the site."""
    # A filter of warnings would apply to all threads; instead Pyro does not look for NaN.
    with one_at_a_time(), pyro.settings.context(validate_poutine=False):
        yield


def _make_parameters(model: Callable[..., Any], guide: nn.Module, batch: tuple[Any, Any]) -> dict[str, Tensor]:
    """Run model and guide once, so that all parameters exist; returns those outside both modules."""
    with one_at_a_time(), evaluating(model, guide), torch.no_grad(), poutine.block():
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
        # Under the name of a module's parameter, Pyro's store can hold an unused namesake.
        namesake = isinstance(value, nn.Parameter) and isinstance(model, nn.Module)
        if id(value) not in known and not namesake:
            loose[name] = value
    return loose


def autocasting(model: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """Run a model under ``torch.autocast``; densities and KLs of its sites are computed later, in full precision."""

    @wraps(getattr(model, "forward", model))
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return model(*args, **kwargs)

    run.in_full_precision = model  # type: ignore[attr-defined]
    return run
