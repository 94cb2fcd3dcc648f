# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The training step, and everything that it changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_radial._pyro.checks import load_states, states
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Batch, Model
from pyro_radial.infer.compiler.cache import Graphs
from pyro_radial.infer.data import num_rows, split_batch
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.infer.loss.not_finite import check_parameters
from pyro_radial.infer.loss.terms import LossTerms
from pyro_radial.infer.optim.joint import (
    DEFAULT_OPTIM,
    GuideOptim,
    JointOptimizer,
    Optim,
    make_optimizer,
    unconstrained_parameters,
)
from pyro_radial.infer.step.evaluation import Call, LossEvaluation, evaluate_loss, has_terms
from pyro_radial.infer.step.stepper import Stepper
from pyro_radial.infer.training.checkpoint import Checkpoint, State, copy_state
from pyro_radial.nn.modules import Autocast, device_of, evaluating
from pyro_radial.poutine import mean_only


class Trainer:
    """Train a model and a guide, one optimizer step at a time.

    :param model: a Pyro model ``model(x, y)``.
    :param guide: its guide.
    :param batch: inputs and targets to run both on once, so that all parameters exist.
    :param TermsELBO loss: a loss that keeps its terms; :class:`~pyro_radial.TermsELBO` by default.
    :param optim: a function from parameters to a torch optimizer, or a Pyro optimizer; Adam at 1e-3 by default.
    :param float clip_norm: the largest norm of all gradients together; None for no clipping.
    :param torch.dtype autocast: the dtype of the model's matrix products; None for its own dtype.
    :param int accumulate: the number of parts of a batch, which see the same draw of the weights.
    :param graphs: replay the loss; None runs the program as it is.
    :param int compile_rows: the number of rows of a part whose graph is compiled, at its first use; others replay a
        recorded graph. So a resumed run replays what an undisturbed one does.
    :param check: a function of the loss's terms that raises an error if they are wrong.
    :raises FloatingPointError: naming the first parameter that is NaN or infinite.
    """

    def __init__(
        self,
        model: Model,
        guide: nn.Module,
        batch: tuple[Batch, Batch],
        *,
        loss: TermsELBO | None = None,
        optim: Optim = DEFAULT_OPTIM,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        accumulate: int = 1,
        graphs: Graphs | None = None,
        compile_rows: int | None = None,
        check: Callable[[LossTerms], None] | None = None,
    ) -> None:
        self.loss = TermsELBO() if loss is None else loss
        check_parameters(self.loss(model, guide).named_parameters(), 0)  # type: ignore[arg-type]
        self.model = model
        self.guide = guide
        self.device = device_of(guide, model)
        self._loose = _make_parameters(model, guide, batch)
        self._run = model if autocast is None else Autocast(model, autocast, self.device)
        # Let the loss do what it does at its first call, such as find the nesting of plates; an error comes again in
        # the first step, with its number.
        with without_warnings(), evaluating(model, guide), torch.no_grad(), suppress(Exception):
            self.loss(self._run, guide)(*batch)  # type: ignore[arg-type]
        #: Everything that an optimizer can change, by name.
        self.parameters: dict[str, Tensor] = {**self.module_parameters(), **self._loose}
        self.optimizer = self._make_optimizer(optim, batch)
        #: The learning rate of each group of parameters before any schedule.
        self.learning_rates = [float(group.get("lr", 0)) for group in self.optimizer.param_groups]
        self._accumulate = accumulate
        self._graphs = graphs
        self._compile_rows = compile_rows
        # The parts of a batch would overwrite each other's gradients in a captured graph.
        self._in_graph = graphs is not None and accumulate == 1
        self._eager_optimizer_reason = None if clip_norm is None else "gradients are clipped"
        self._likelihood = TermsELBO(kl_weight=0.0)
        self._check_terms = check
        joint_optimizer = JointOptimizer(self.optimizer, clip_norm)
        self._stepper = Stepper(self._evaluate, joint_optimizer, parameters=self.parameters)

    @property
    def steps_done(self) -> int:
        """Optimizer steps taken so far, across resumes."""
        return self._stepper.steps_done

    def _make_optimizer(self, optim: Optim, batch: tuple[Batch, Batch]) -> Optimizer:
        """Return an optimizer of all parameters that require gradients."""
        if isinstance(optim, GuideOptim):
            return optim.optimizer(self.model, self.guide, *batch)
        trained = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        return make_optimizer(optim, trained)

    def step(self, batch: tuple[Batch, Batch], *, of_means: bool = False) -> tuple[Tensor, float]:
        """Take one optimizer step on inputs and targets.

        :param of_means: whether to take it on the likelihood alone, at the means of the weights.
        :returns: the loss, negative log-likelihood and KL in nats per datum, on the device, and the weight of the KL.
        :raises FloatingPointError: naming what is NaN or infinite in the loss; no step is taken. On a GPU it is raised
            some steps later, or by :meth:`look`.
        """
        loss = self._likelihood if of_means else self.loss
        calls = [
            self._call(loss, rows, gradient_scale)
            for rows, gradient_scale in split_batch(batch, self._accumulate)
        ]
        with without_warnings(), mean_only() if of_means else nullcontext():
            evaluations = self._stepper.step(calls)
        values = torch.zeros(3, dtype=torch.float64, device=self.device)
        for evaluation, call in zip(evaluations, calls, strict=True):
            if evaluation.summary is not None:
                values += evaluation.summary.double() * call.gradient_scale
        terms = evaluations[-1].terms
        return values, 0.0 if of_means or terms is None else terms.kl_weight

    def look(self) -> None:
        """Raise the error of a step since the last look, if its loss was not finite, or of a parameter that is not."""
        self._stepper.look()
        check_parameters(self.parameters.items(), self.steps_done)

    def _call(self, loss: TermsELBO, rows: tuple[Batch, Batch], gradient_scale: float) -> Call:
        """Return what to evaluate for some rows of a batch in the next step."""
        call = Call(
            loss,
            self._run,
            self.guide,
            rows,
            {},
            extra_parameters=self.parameters,
            weight=loss.weight_at(self.steps_done) if has_terms(loss) else 1.0,
            gradient_scale=gradient_scale,
            step=self.steps_done + 1,
            check=self._check_terms,
        )
        if not self._in_graph:
            return call
        return call._replace(
            optimizer=self.optimizer,
            eager_optimizer_reason=self._eager_optimizer_reason,
            stopped=self._stepper.stopped,
        )

    def _evaluate(self, call: Call) -> LossEvaluation:
        """Evaluate a part of a batch."""
        if self._graphs is None:
            return evaluate_loss(call)
        return self._graphs(call, compile_now=num_rows(call.args[0]) == self._compile_rows)

    def modules(self) -> dict[str, State]:
        """Return the state of the guide, of the model, and of parameters outside both."""
        model = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        # By position, because names in Pyro's store count the instances that a process has made.
        loose: State = {str(position): value for position, value in enumerate(self._loose.values())}
        return {"guide": self.guide.state_dict(), "model": model, "loose": loose}

    def copy_of_modules(self) -> dict[str, State]:
        """Copy :meth:`modules`, so that further training does not change it."""
        return {role: copy_state(entries) for role, entries in self.modules().items()}

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
        """Return the state of everything that a step changes, except random numbers."""
        return {
            **self.copy_of_modules(),
            "optimizer": self.optimizer.state_dict(),
            "learning_rates": self.learning_rates,
            "steps_done": self.steps_done,
            "loss": states(stateful_attributes(self.loss)),
        }

    def load_state_dict(self, state: State) -> None:
        """Load what :meth:`state_dict` returned; see :meth:`check_entries`."""
        self.optimizer.load_state_dict(state["optimizer"])
        load_states(stateful_attributes(self.loss), state["loss"])
        self.load_modules(state)
        self._stepper.steps_done = state["steps_done"]

    def module_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the guide, the model and the loss, by name."""
        return dict(self.loss(self.model, self.guide).named_parameters())  # type: ignore[arg-type]


def stateful_attributes(loss: object) -> dict[str, Any]:
    """Return the attributes of a loss that may have a state, such as measurement points."""
    # Modules of a loss, such as a prior on functions, are not trained.
    return {
        name: value
        for name, value in getattr(loss, "__dict__", {}).items()
        if not isinstance(value, nn.Module)
    }


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence Pyro's warnings about NaN in log-densities, because training stops with the name of the site."""
    # A filter of warnings would apply to all threads; instead Pyro does not look for NaN.
    with one_at_a_time(), pyro.settings.context(validate_poutine=False):
        yield


def _make_parameters(
    model: Model, guide: nn.Module, batch: tuple[Batch, Batch]
) -> dict[str, Tensor]:
    """Run model and guide once, so that all parameters exist; returns those outside both modules."""
    with one_at_a_time(), evaluating(model, guide), torch.no_grad(), poutine.block():
        getattr(guide, "setup", guide)(*batch)
        with seeded(0, device_of(guide, model)), poutine.trace(param_only=True) as capture:
            drawn = poutine.trace(guide).get_trace(*batch)
            poutine.replay(model, trace=drawn)(*batch)
    module_parameters: set[Tensor] = set()
    for module in (model, guide):
        if isinstance(module, nn.Module):
            module_parameters.update(module.parameters())
    loose = {}
    for name, value in unconstrained_parameters(capture.trace).items():
        # Under the name of a module's parameter, Pyro's store can hold an unused namesake.
        namesake = isinstance(value, nn.Parameter) and isinstance(model, nn.Module)
        if value not in module_parameters and not namesake:
            loose[name] = value
    return loose
