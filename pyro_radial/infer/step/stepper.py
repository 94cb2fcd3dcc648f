# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Take training steps: evaluate the loss, check it, and apply the gradients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_radial._pyro.compat import steps_stop, stop_where, tree_leaves
from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial.infer.loss.not_finite import (
    check_observations,
    find_not_finite,
    not_finite_error,
)
from pyro_radial.infer.step.evaluation import Call, LossEvaluation, Mode, keep_terms
from pyro_radial.infer.step.optimizer import (
    JointOptimizer,
    add_gradients,
    naming_devices,
)

# Reading a loss waits for the device. So a GPU's losses are checked after this many steps, or after fewer if the
# arguments of these steps take more bytes than MOST_BYTES.
CHECK_EVERY = 50
MOST_BYTES = 2**28


class Step(NamedTuple):
    """One step: its number from zero, the calls for the parts of a batch, and torch's noise before them."""

    number: int
    calls: Sequence[Call]
    noise: TorchNoise


class Stepper:
    """Take the steps of an optimizer on the gradients of losses that are finite.

    On a GPU, reading a loss waits for the device, so one look checks many steps. Until the look, ``stopped`` tells the
    optimizer on the device to change nothing. An optimizer that cannot be stopped there is checked in each step.

    :param evaluate: evaluates a call, as the program itself or a graph of it.
    :param optimizer: the optimizer of all parameters.
    :param interval: the number of steps between looks; by default 1 on a CPU and 50 elsewhere.
    :param parameters: all parameters by the names of errors; by default those of the latest evaluation.
    """

    def __init__(
        self,
        evaluate: Callable[[Call], LossEvaluation],
        optimizer: JointOptimizer,
        interval: int | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        #: A 0-d tensor, one after a loss that was not finite; None before the first loss.
        self.stopped: Tensor | None = None
        self._evaluate = evaluate
        self._interval = interval
        self._given_parameters = parameters
        self._parameters: Mapping[str, Tensor] = parameters or {}
        self._unchecked_steps: list[Step] = []

    def step(self, calls: Sequence[Call], number: int) -> list[LossEvaluation]:
        """Evaluate the loss of each part of a batch on the same draws of the weights, check it, and take a step.

        :param number: the number of the step for messages, counted from zero.
        :raises FloatingPointError: naming what is NaN or infinite; no step is taken on it. On a GPU it is raised some
            steps later, or by :meth:`look`, and the steps between change nothing.
        :raises ValueError: for an observation outside of its support.
        """
        step = Step(number, calls, TorchNoise.current())
        self.optimizer.forget_gradients()
        evaluations: list[LossEvaluation] = []
        for call in calls:
            if evaluations:
                step.noise.restore()
            evaluation = keep_terms(call, self._evaluate_or_explain(step, call))
            evaluations.append(evaluation)
            self.optimizer.adopt(evaluation.parameters)
            add_gradients(evaluation.parameters_with_gradients())
        self._check(step, evaluations)
        self.optimizer.apply(stepped=evaluations[-1].stepped)
        return evaluations

    def replace_optimizer(self, optimizer: JointOptimizer) -> None:
        """Take later steps by another optimizer, without the gradients of earlier ones."""
        self.look()
        self.optimizer.forget_gradients()
        self.optimizer = optimizer

    def look(self) -> None:
        """Raise the error of a step since the last look, if its loss was not finite, and let later steps go on."""
        steps = self._unchecked_steps
        self._unchecked_steps = []
        if steps and self.stopped is not None and bool(self.stopped):
            self.stopped.zero_()
            if self.optimizer.optimizer is not None:
                stop_where(self.optimizer.optimizer, None)
            raise self._explain(steps)

    def _check(self, step: Step, evaluations: Sequence[LossEvaluation]) -> None:
        """Note whether the losses of a step are finite, let the optimizer stop if not, and look if it is time to.

        An evaluation in a CUDA graph, of mode "captured", has set ``stopped`` itself. If it has also ``stepped``, the
        graph has taken the optimizer's step, or left it out after a loss that is not finite.
        """
        # None before the first loss has shown the parameters.
        optimizer = self.optimizer.optimizer
        self._unchecked_steps.append(step)
        nonfinite = evaluations[0].nonfinite
        interval = self._interval or _usual_interval(step, nonfinite.device)
        if self.stopped is None:
            self.stopped = torch.zeros_like(nonfinite)
        for evaluation in evaluations:
            if evaluation.mode != Mode.CAPTURED:
                torch.maximum(self.stopped, evaluation.nonfinite, out=self.stopped)
        can_wait = evaluations[-1].stepped or (optimizer is not None and steps_stop(optimizer))
        if optimizer is not None and interval > 1:
            stop_where(optimizer, self.stopped)
        self._parameters = self._given_parameters or evaluations[-1].parameters
        if len(self._unchecked_steps) >= interval or not can_wait:
            self.look()

    def _evaluate_or_explain(self, step: Step, call: Call) -> LossEvaluation:
        """Evaluate a call; where validation stops the program, raise an error that names what is not finite."""
        try:
            if call.optimizer is None:
                return self._evaluate(call)
            # The evaluation may take the step of the optimizer.
            with naming_devices(call.optimizer):
                return self._evaluate(call)
        except ValueError as error:
            # Validation stops at the first value that is not finite, and may not say where that came from.
            nonfinite: list[str] = []
            with suppress(Exception):
                nonfinite = self._find_not_finite(step._replace(calls=[call]))
            if not nonfinite:
                raise
            raise not_finite_error(nonfinite, step.number) from error

    def _explain(self, steps: Sequence[Step]) -> FloatingPointError:
        """Return the error for the first of these steps with a loss that is not finite, found by repeating them."""
        for step in steps:
            if nonfinite := self._find_not_finite(step):
                return not_finite_error(nonfinite, step.number)
        return not_finite_error(["the sum of the terms of the loss"], steps[-1].number)

    def _find_not_finite(self, step: Step) -> list[str]:
        """Repeat a step with its noise, and return in words what is not finite.

        :raises ValueError: for an observation outside of its support, which a graph checks as a part of the loss.
        """
        with torch.random.fork_rng():
            for call in step.calls:
                step.noise.restore()
                check_observations(call.model, call.guide, call.args, call.kwargs)
                step.noise.restore()
                if nonfinite := find_not_finite(
                    call.loss, call.model, call.guide, call.args, call.kwargs, self._parameters
                ):
                    return nonfinite
        return []


def _usual_interval(step: Step, device: torch.device) -> int:
    """Return the usual number of steps between looks: one on a CPU, else at most ``CHECK_EVERY``."""
    if device.type == "cpu":
        return 1
    leaves = tree_leaves([call.args for call in step.calls])
    size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return max(1, min(CHECK_EVERY, MOST_BYTES // max(1, size)))
