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
from pyro_radial.infer.step.inductor import GraphFunction
from pyro_radial.infer.step.loss_evaluation import CAPTURED, Call, LossEvaluation
from pyro_radial.infer.step.recording import Recording
from pyro_radial.infer.step.signature import Leaves

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
        current_stream = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current_stream)
        with torch.cuda.stream(self._stream):
            result = body()
        current_stream.wait_stream(self._stream)
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


class CapturedStep:
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
        self._caller_reason = call.eager_optimizer_reason
        self._inputs: list[Tensor] = []
        self._is_copied: list[bool] = []
        self._numbers: list[Any] = []
        self._replay: Body | None = None
        self._warm_ups = 0
        self.captures = 0
        # What the graph fixes.
        self._fixed: object = None
        ordinary_optimizer = (
            optimizer.other_optimizer if isinstance(optimizer, GraphOptimizer) else optimizer
        )
        self._rates = None if ordinary_optimizer is None else RateTensors(ordinary_optimizer)
        #: Why the optimizer takes its step after the graph; None if the graph takes it.
        self.eager_optimizer_reason = self._find_eager_optimizer_reason()

    def is_of(self, call: Call) -> bool:
        """Return whether the graph takes the steps of a call's optimizer."""
        return call.optimizer is self._optimizer

    def __call__(self, call: Call, leaves: Leaves) -> LossEvaluation:
        """Take a step on the leaves of the arguments."""
        self._write(call, leaves)
        if self._replay is not None and self._fixed != self._fixed_now(call):
            self._replay = None
            self._warm_ups = 0
            self.eager_optimizer_reason = self._find_eager_optimizer_reason()
        if self._replay is not None:
            evaluation = self._replay()
        elif self._warm_ups < WARM_UPS:
            self._warm_ups += 1
            evaluation = self._device.warm_up(lambda: self._body(call))
        elif self.captures >= MOST_CAPTURES:
            raise CaptureError(
                "its tensors, or settings of its optimizer, are replaced again and again"
            )
        else:
            self._replay = self._device.capture(lambda: self._body(call))
            self.captures += 1
            self._fixed = self._fixed_now(call)
            evaluation = self._replay()
        return self._recording.evaluation_of_program(call, _copy_results(evaluation), CAPTURED)

    def _find_eager_optimizer_reason(self) -> str | None:
        """Return why the optimizer's step cannot be in the graph."""
        if self._caller_reason is not None:
            return self._caller_reason
        for name, parameter in self._recording.parameters.items():
            if post_accumulate_hooks(parameter):
                return f"a hook changes the gradient of {name}"
        return None if self._rates is None else self._rates.uncapturable_reason()

    def _body(self, call: Call) -> LossEvaluation:
        """Run what the graph does."""
        recording = self._recording
        with torch.no_grad():
            tensors = self._code(*recording.constants, *self._inputs)
            evaluation: LossEvaluation = recording.graph.result(tensors)
            if call.stopped is not None:
                torch.maximum(call.stopped, evaluation.nonfinite, out=call.stopped)
        is_graph_optimizer = isinstance(self._optimizer, GraphOptimizer)
        if self.eager_optimizer_reason is not None or (
            is_graph_optimizer and not evaluation.updated_in_graph
        ):
            return evaluation
        if self._rates is not None:
            parameters = list(recording.parameters.values())
            self._rates.step(parameters, evaluation.gradients, call.stopped)
        return evaluation._replace(gradients=(None,) * len(evaluation.gradients), stepped=True)

    def _write(self, call: Call, leaves: Leaves) -> None:
        """Write what changes from step to step to where the graph reads it."""
        tensors = leaves.tensors()
        numbers = self._recording.numbers(call, leaves)
        if not self._inputs:
            self._inputs = self._recording.inputs(call, leaves)
            self._is_copied = [False] * len(tensors)
        elif self._numbers != numbers:
            for memory, number in zip(self._inputs, numbers, strict=False):
                memory.fill_(number)
        self._numbers = numbers
        for position, tensor in enumerate(tensors, len(numbers)):
            memory = self._inputs[position]
            if self._is_copied[position - len(numbers)]:
                memory.copy_(tensor, non_blocking=True)
            elif memory is not tensor:
                self._inputs[position] = tensor.clone()
                self._is_copied[position - len(numbers)] = True
                self._replay = None
        if call.graph_optimizer is not None:
            call.graph_optimizer.write_rates()
        if self._rates is not None:
            self._rates.write()

    def _fixed_now(self, call: Call) -> tuple[object, ...]:
        """Return what the graph fixes: where tensors are, settings of the optimizer, and whether there are hooks."""
        tensors = [*self._recording.constants, *self._inputs]
        hooks = any(map(post_accumulate_hooks, self._recording.parameters.values()))
        if self.eager_optimizer_reason is not None:
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

    def uncapturable_reason(self) -> str | None:
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
        for position, group in enumerate(groups):
            if group["lr"] != self._written[position]:
                self._tensors[position].fill_(group["lr"])
                self._written[position] = group["lr"]

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
        original_settings = [(group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, self._tensors, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = capturing
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(groups, original_settings, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = capturable


def _copy_results(evaluation: LossEvaluation) -> LossEvaluation:
    """Return what the graph gave, with the numbers that are handed on in memory of their own."""
    summary = None if evaluation.summary is None else evaluation.summary.clone()
    return evaluation._replace(loss=evaluation.loss.clone(), summary=summary)
