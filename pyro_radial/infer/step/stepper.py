# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Take a training step: evaluate the loss, check it, and apply the gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.compat import steps_stop, stop_where, tree_leaves
from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial.infer.optim.joint import GraphOptimizer, JointOptimizer, add_gradients
from pyro_radial.infer.step.evaluation import CAPTURED, Call, LossEvaluation, has_terms

# Reading a loss waits for the device. So a GPU's losses are checked after this many steps, or after fewer if the
# arguments of these steps take more bytes than MOST_BYTES.
CHECK_EVERY = 50
MOST_BYTES = 2**28


class Step(NamedTuple):
    """One step: the calls for the parts of a batch, and the state of torch's noise before the first of them."""

    calls: Sequence[Call]
    noise: TorchNoise


def take_step(
    calls: Sequence[Call],
    evaluate: Callable[[Call], LossEvaluation],
    check: "FiniteCheck",
    optimizer: JointOptimizer,
) -> list[LossEvaluation]:
    """Evaluate the loss of each part of a batch on the same noise, check the losses, and take the optimizer's step."""
    step = Step(calls, TorchNoise.current())
    optimizer.forget_gradients()
    evaluations: list[LossEvaluation] = []
    for call in calls:
        if evaluations:
            step.noise.restore()
        evaluation = evaluate(call)
        evaluations.append(evaluation)
        keep_terms(call, evaluation)
        optimizer.adopt(evaluation.parameters)
        add_gradients(evaluation.parameters_with_gradients())
    check(step, evaluations, optimizer.optimizer)
    optimizer.apply(
        updated_in_graph=bool(evaluations[-1].updated_in_graph), stepped=evaluations[-1].stepped
    )
    return evaluations


def keep_terms(call: Call, evaluation: LossEvaluation) -> None:
    """Store the terms of an evaluation in the loss, where users can read them."""
    terms = evaluation.terms
    if terms is None or not has_terms(call.loss):
        return
    # The next captured step overwrites the terms, so they are copied when a user reads them.
    read = partial(terms.map, Tensor.clone) if evaluation.mode == CAPTURED else lambda: terms
    call.loss.keep(read, call.gradients)


class FiniteCheck:
    """Raise an error if a loss is not finite, before the optimizer takes a step on it.

    On a GPU, reading a loss waits for the device, so one look checks many steps. Until the look, ``stopped`` tells the
    optimizer on the device to change nothing. An optimizer that cannot be stopped there is checked in each step.

    :param interval: the number of steps between looks; by default 1 on a CPU and 50 elsewhere.
    :param explain: returns the error, given the steps since the last look.
    """

    def __init__(
        self, interval: int | None, explain: Callable[[Sequence[Step]], Exception]
    ) -> None:
        self._interval = interval
        self._explain = explain
        self._unchecked_steps: list[Step] = []
        #: A 0-d tensor, one after a loss that was not finite; None before the first loss.
        self.stopped: Tensor | None = None

    def __call__(
        self, step: Step, evaluations: Sequence[LossEvaluation], optimizer: Optimizer | None
    ) -> None:
        """Note whether the losses of a step are finite, before the step is applied, and look if it is time to."""
        self._unchecked_steps.append(step)
        nonfinite = evaluations[0].nonfinite
        interval = self._interval or _usual_interval(step, nonfinite.device)
        if isinstance(optimizer, GraphOptimizer):
            self.stopped = optimizer.stopped
        elif self.stopped is None:
            self.stopped = torch.zeros_like(nonfinite)
        for evaluation in evaluations:
            if evaluation.mode != CAPTURED:
                torch.maximum(self.stopped, evaluation.nonfinite, out=self.stopped)
        can_wait = evaluations[-1].stepped or (optimizer is not None and steps_stop(optimizer))
        if optimizer is not None and interval > 1:
            stop_where(optimizer, self.stopped)
        if len(self._unchecked_steps) >= interval or not can_wait:
            self.look(optimizer)

    def look(self, optimizer: Optimizer | None = None) -> None:
        """Raise an error if a loss since the last look was not finite."""
        steps = self._unchecked_steps
        self._unchecked_steps = []
        if steps and self.stopped is not None and bool(self.stopped):
            self.stopped.zero_()
            if optimizer is not None:
                stop_where(optimizer, None)
            raise self._explain(steps)


def _usual_interval(step: Step, device: torch.device) -> int:
    """Return the usual number of steps between looks: one on a CPU, else at most ``CHECK_EVERY``."""
    if device.type == "cpu":
        return 1
    leaves = tree_leaves([call.args for call in step.calls])
    size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return max(1, min(CHECK_EVERY, MOST_BYTES // max(1, size)))
