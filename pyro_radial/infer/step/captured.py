# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A whole training step as one graph of a device: noise, loss, gradients, and the step of the optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.compat import (
    addresses,
    has_step_hooks,
    post_accumulate_hooks,
    steps_stop,
    stop_where,
)
from pyro_radial.infer.optim.joint import GraphOptimizer, naming_devices
from pyro_radial.infer.step.arguments import Leaves
from pyro_radial.infer.step.inductor import GraphFunction
from pyro_radial.infer.step.loss_evaluation import CAPTURED, Call, LossEvaluation
from pyro_radial.infer.step.recording import Recording

# Steps before a capture, which make the optimizer's state and load kernels.
WARM_UPS = 2
# A step that must be captured more often than this runs without.
MOST_CAPTURES = 8
# Entries of a group of parameters that a graph does not fix.
CHANGING = ("params", "lr", "initial_lr")


class CaptureError(RuntimeError):
    """A device cannot capture a step, which has not been taken."""


Body = Callable[[], LossEvaluation]


class Device(ABC):
    """Something that captures a function on tensors, and replays it on what is in the same memory then."""

    @abstractmethod
    def warm_up(self, body: Body) -> LossEvaluation:
        """Run a function as it will be captured."""

    @abstractmethod
    def capture(self, body: Body) -> Body:
        """Return a function that replays what the function does; its result is in the same memory each time."""


class CudaGraphs(Device):
    """CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def warm_up(self, body: Body) -> LossEvaluation:
        """Run a function on another stream, as a capture does."""
        now = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            result = body()
        now.wait_stream(self._stream)
        return result

    def capture(self, body: Body) -> Body:
        """Capture a function as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = body()
        except RuntimeError as error:
            raise CaptureError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        self._pool = graph.pool()

        def replay() -> LossEvaluation:
            graph.replay()
            return result

        return replay


def device_graphs(device: torch.device) -> Device | None:
    """Return the graphs of a device, or None if it has none."""
    return CudaGraphs(device) if device.type == "cuda" else None


class Captured:
    """Replay a recorded program and the step of the optimizer as one graph.

    Arguments are copied into memory that the graph reads, unless they are the same tensors at each step. A graph is
    captured anew if tensors that it reads have moved, or if settings of the optimizer besides learning rates change.
    """

    def __init__(
        self,
        recording: Recording,
        code: GraphFunction,
        call: Call,
        optimizer: Optimizer,
        device: Device,
    ) -> None:
        self._recording = recording
        self._code = code
        self._device = device
        self._optimizer = optimizer
        self._outside = call.outside
        self._inputs: list[Tensor] = []
        self._owned: list[bool] = []
        self._numbers: list[Any] = []
        self._replay: Body | None = None
        self._warm_ups = 0
        self.captures = 0
        # What the graph fixes.
        self._fixed: object = None
        own = optimizer.others if isinstance(optimizer, GraphOptimizer) else optimizer
        self._rates = None if own is None else RateTensors(own)
        #: Why the optimizer takes its step after the graph; None if the graph takes it.
        self.outside_because = self._reason()

    def is_of(self, call: Call) -> bool:
        """Return whether the graph takes the steps of a call's optimizer."""
        return call.optimizer is self._optimizer

    def __call__(self, call: Call, leaves: Leaves) -> LossEvaluation:
        """Take a step on the leaves of the arguments."""
        self._write(call, leaves)
        if self._replay is not None and self._fixed != self._fixed_now(call):
            self._replay = None
            self._warm_ups = 0
            self.outside_because = self._reason()
        if self._replay is not None:
            found = self._replay()
        elif self._warm_ups < WARM_UPS:
            self._warm_ups += 1
            found = self._device.warm_up(lambda: self._body(call))
        elif self.captures >= MOST_CAPTURES:
            raise CaptureError(
                "its tensors, or settings of its optimizer, are replaced again and again"
            )
        else:
            self._replay = self._device.capture(lambda: self._body(call))
            self.captures += 1
            self._fixed = self._fixed_now(call)
            found = self._replay()
        return self._recording.evaluation(call, _copy_results(found), CAPTURED)

    def _reason(self) -> str | None:
        """Return why the optimizer's step cannot be in the graph."""
        if self._outside is not None:
            return self._outside
        for name, parameter in self._recording.parameters.items():
            if post_accumulate_hooks(parameter):
                return f"a hook changes the gradient of {name}"
        return None if self._rates is None else self._rates.not_capturable_because()

    def _body(self, call: Call) -> LossEvaluation:
        """Run what the graph does."""
        recording = self._recording
        with torch.no_grad():
            tensors = self._code(*recording.constants, *self._inputs)
            found: LossEvaluation = recording.graph.result(tensors)
            if call.stopped is not None:
                torch.maximum(call.stopped, found.broken, out=call.stopped)
        natural = isinstance(self._optimizer, GraphOptimizer)
        if self.outside_because is not None or (natural and not found.moved):
            return found
        if self._rates is not None:
            parameters = list(recording.parameters.values())
            self._rates.step(parameters, found.gradients, call.stopped)
        return found._replace(gradients=(None,) * len(found.gradients), stepped=True)

    def _write(self, call: Call, leaves: Leaves) -> None:
        """Write what changes from step to step to where the graph reads it."""
        tensors = leaves.tensors()
        numbers = self._recording.numbers(call, leaves)
        if not self._inputs:
            self._inputs = self._recording.inputs(call, leaves)
            self._owned = [False] * len(tensors)
        elif self._numbers != numbers:
            for own, number in zip(self._inputs, numbers, strict=False):
                own.fill_(number)
        self._numbers = numbers
        for place, tensor in enumerate(tensors, len(numbers)):
            mine = self._inputs[place]
            if self._owned[place - len(numbers)]:
                mine.copy_(tensor, non_blocking=True)
            elif mine is not tensor:
                self._inputs[place] = tensor.clone()
                self._owned[place - len(numbers)] = True
                self._replay = None
        if call.mover is not None:
            call.mover.write_rates()
        if self._rates is not None:
            self._rates.write()

    def _fixed_now(self, call: Call) -> tuple[object, ...]:
        """Return what the graph fixes: where tensors are, settings of the optimizer, and whether there are hooks."""
        tensors = [*self._recording.constants, *self._inputs]
        hooks = any(map(post_accumulate_hooks, self._recording.parameters.values()))
        if self.outside_because is not None:
            return addresses(tensors), hooks, call.stopped is None
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        settings: list[object] = []
        for group in self._optimizer.param_groups:
            settings += [value for key, value in group.items() if key not in CHANGING]
        # A loaded state is another dict.
        fixed = id(self._optimizer.state), has_step_hooks(self._optimizer), settings
        return addresses(tensors), hooks, call.stopped is None, fixed


class RateTensors:
    """The learning rates of an optimizer as tensors, so that a graph of its step can read them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._written: list[float] = []

    def not_capturable_because(self) -> str | None:
        """Return why a graph cannot take a step of the optimizer."""
        name = type(self._optimizer).__name__
        if has_step_hooks(self._optimizer):
            return f"{name} has hooks at its steps"
        if not steps_stop(self._optimizer):
            return f"{name} has no fused step; make it with fused=True, or use torch.optim.Adam, AdamW or SGD"
        return None

    def write(self) -> None:
        """Write the present rates to the tensors."""
        groups = self._optimizer.param_groups
        if len(self._tensors) != len(groups):
            self._tensors = [torch.empty((), device=group["params"][0].device) for group in groups]
            self._written = [float("nan")] * len(groups)
        for place, group in enumerate(groups):
            if group["lr"] != self._written[place]:
                self._tensors[place].fill_(group["lr"])
                self._written[place] = group["lr"]

    def step(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        stopped: Tensor | None,
    ) -> None:
        """Take a step of the optimizer at these rates, unless ``stopped`` is one."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with self._in_groups():
            stop_where(self._optimizer, stopped)
            try:
                with naming_devices(self._optimizer):
                    self._optimizer.step()
            finally:
                stop_where(self._optimizer, None)
        for parameter in parameters:
            parameter.grad = None

    @contextmanager
    def _in_groups(self) -> Iterator[None]:
        """Let groups have the tensors as rates, and say so that they may be captured."""
        groups = self._optimizer.param_groups
        capturing = self._tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, self._tensors, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = capturing
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable


def _copy_results(found: LossEvaluation) -> LossEvaluation:
    """Return what the graph gave, with the numbers that are handed on in memory of their own."""
    summary = None if found.summary is None else found.summary.clone()
    return found._replace(loss=found.loss.clone(), summary=summary)
