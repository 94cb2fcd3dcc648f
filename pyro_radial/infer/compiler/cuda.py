# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Capture a whole training step as one CUDA graph: noise, loss, gradients, and the step of the optimizer."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.compat import (
    addresses,
    gradient_hooks,
    has_step_hooks,
    steps_stop,
    stop_where,
)
from pyro_radial.infer.compiler.signature import Leaves
from pyro_radial.infer.compiler.state import Refused, first_line
from pyro_radial.infer.step.evaluation import Call, LossEvaluation, Mode

# Steps before a capture, in which the optimizer creates its state and kernels are loaded.
WARM_UPS = 2
# After more captures than this, steps run without a captured graph.
MOST_CAPTURES = 8
# Entries of a parameter group that may change while a captured graph is in use.
CHANGING = ("params", "lr", "initial_lr")


Body = Callable[[], LossEvaluation]


class CudaGraphs:
    """Captures functions of tensors in fixed memory as CUDA graphs, which share one pool of memory.

    Each replay reads and writes the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def warm_up(self, body: Body) -> LossEvaluation:
        """Run a function once without a capture, on the stream of later captures, as preparation for one."""
        current_stream = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current_stream)
        with torch.cuda.stream(self._stream):
            result = body()
        current_stream.wait_stream(self._stream)
        return result

    def capture(self, body: Body) -> Body:
        """Return a function that replays the operations of ``body``; its result is in the same memory each time."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = body()
        except RuntimeError as error:
            raise Refused(first_line(error)) from error
        self._pool = graph.pool()

        def replay() -> LossEvaluation:
            graph.replay()
            return result

        return replay


def device_graphs(device: torch.device) -> CudaGraphs | None:
    """Return what captures steps on a GPU, or None on a CPU."""
    return CudaGraphs(device) if device.type == "cuda" else None


class CapturedStep:
    """A recorded program and the step of the optimizer, captured as one graph and replayed.

    Arguments are copied into memory that the graph reads, unless they are the same tensors at each step. The step is
    captured again if tensors that it reads have another address, or if settings of the optimizer besides learning rates
    change.

    :param program: the recorded :class:`Program`.
    """

    def __init__(
        self, program: Any, call: Call, optimizer: Optimizer, cuda_graphs: CudaGraphs
    ) -> None:
        self._program = program
        self._cuda_graphs = cuda_graphs
        #: The optimizer whose steps are captured.
        self.optimizer = optimizer
        self._caller_reason = call.eager_optimizer_reason
        self._inputs: list[Tensor] = []
        self._is_copied: list[bool] = []
        self._numbers: list[Any] = []
        self._replay: Body | None = None
        self._warm_ups = 0
        self.captures = 0
        # The properties that the captured graph depends on; see _fixed_properties.
        self._fixed: object = None
        self._rates = RateTensors(optimizer)
        #: Why the optimizer takes its step after the graph; None if its step is in the graph.
        self.eager_optimizer_reason = self._find_eager_optimizer_reason()

    def __call__(self, call: Call, leaves: Leaves) -> LossEvaluation:
        """Take a step: warm up at first, then capture, and replay from then on."""
        self._write_inputs(call, leaves)
        if self._replay is not None and self._fixed != self._fixed_properties(call):
            self._replay = None
            self._warm_ups = 0
            self.eager_optimizer_reason = self._find_eager_optimizer_reason()
        if self._replay is not None:
            evaluation = self._replay()
        elif self._warm_ups < WARM_UPS:
            self._warm_ups += 1
            evaluation = self._cuda_graphs.warm_up(lambda: self._run_step(call))
        elif self.captures >= MOST_CAPTURES:
            raise Refused("its tensors, or settings of its optimizer, are replaced again and again")
        else:
            self._replay = self._cuda_graphs.capture(lambda: self._run_step(call))
            self.captures += 1
            self._fixed = self._fixed_properties(call)
            evaluation = self._replay()
        # The next replay overwrites the memory of loss and summary.
        summary = None if evaluation.summary is None else evaluation.summary.clone()
        return evaluation._replace(loss=evaluation.loss.clone(), summary=summary)

    def _find_eager_optimizer_reason(self) -> str | None:
        """Return why the optimizer's step cannot be in the graph, or None if it can."""
        if self._caller_reason is not None:
            return self._caller_reason
        for name, parameter in self._program.parameters.items():
            if gradient_hooks(parameter):
                return f"a hook changes the gradient of {name}"
        return self._rates.uncapturable_reason()

    def _run_step(self, call: Call) -> LossEvaluation:
        """Run the operations that are captured: the loss, its gradients, and the optimizer's step if possible."""
        program = self._program
        with torch.no_grad():
            tensors = program.code_for(Mode.COMPILED)(*program.constants, *self._inputs)
            evaluation: LossEvaluation = program.graph.result(tensors)
            if call.stopped is not None:
                torch.maximum(call.stopped, evaluation.nonfinite, out=call.stopped)
        if self.eager_optimizer_reason is not None:
            return evaluation
        self._rates.step(program.parameters.values(), evaluation.gradients, call.stopped)
        return evaluation._replace(gradients=(None,) * len(evaluation.gradients), stepped=True)

    def _write_inputs(self, call: Call, leaves: Leaves) -> None:
        """Copy the numbers, arguments and learning rates of this step into the memory that the graph reads."""
        tensors = leaves.tensors()
        numbers = self._program.numbers(call, leaves)
        if not self._inputs:
            self._inputs = self._program.inputs(call, leaves)
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
        self._rates.write()

    def _fixed_properties(self, call: Call) -> tuple[object, ...]:
        """Return the properties that a captured graph fixes: addresses of tensors, optimizer settings and hooks."""
        tensors = [*self._program.constants, *self._inputs]
        hooks = any(map(gradient_hooks, self._program.parameters.values()))
        if self.eager_optimizer_reason is not None:
            return addresses(tensors), hooks, call.stopped is None
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        settings: list[object] = []
        for group in self.optimizer.param_groups:
            settings += [value for key, value in group.items() if key not in CHANGING]
        return (
            addresses(tensors),
            hooks,
            call.stopped is None,
            has_step_hooks(self.optimizer),
            settings,
        )


class RateTensors:
    """The learning rates of an optimizer's groups as tensors, which a captured step reads."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors: list[Tensor] = []
        self._written: list[float] = []

    def uncapturable_reason(self) -> str | None:
        """Return why the optimizer's step cannot be captured, or None if it can."""
        name = type(self._optimizer).__name__
        if has_step_hooks(self._optimizer):
            return f"{name} has hooks at its steps"
        if not steps_stop(self._optimizer):
            return f"{name} has no fused step; make it with fused=True, or use torch.optim.Adam, AdamW or SGD"
        return None

    def write(self) -> None:
        """Copy the current learning rates of the groups into the tensors."""
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
        parameters: Collection[Tensor],
        gradients: Sequence[Tensor | None],
        stopped: Tensor | None,
    ) -> None:
        """Take a step of the optimizer at these rates, ``capturable`` during a capture, unless ``stopped`` is one."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        groups = self._optimizer.param_groups
        capturing = self._tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        original_settings = list(map(dict, groups))
        for group, rate in zip(groups, self._tensors, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = capturing
        stop_where(self._optimizer, stopped)
        try:
            self._optimizer.step()
        finally:
            stop_where(self._optimizer, None)
            for group, settings in zip(groups, original_settings, strict=True):
                group.update(settings)
        for parameter in parameters:
            parameter.grad = None
