# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A recorded program: its graph, the guards that say whether the graph holds, and the inputs that it takes."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import stored_parameters
from pyro_radial.infer.compiler.background import BackgroundCode
from pyro_radial.infer.compiler.cuda import CapturedStep, CudaGraphs
from pyro_radial.infer.compiler.inductor import GraphFunction, Options, compile_at_once
from pyro_radial.infer.compiler.signature import Leaves, is_number, number_tensor
from pyro_radial.infer.compiler.state import Refused, Slot, State, first_line
from pyro_radial.infer.compiler.tensor_graph import Graph, rehearsal
from pyro_radial.infer.step.evaluation import (
    Call,
    LossEvaluation,
    Mode,
)


@dataclass
class Program:
    """The graph of a program, with the state that the program read, and the tensors that the graph takes.

    The inputs of the graph are its constants, the weight of the KL, other numbers, and the tensors among the arguments.
    :meth:`replay` runs it as recorded at first, compiled when its code is ready, and on a GPU as a captured CUDA graph.
    """

    graph: Graph
    state: State
    #: The positions of numbers among the leaves of the arguments.
    positions: Sequence[int]
    #: The slots of the state whose numbers are inputs of the graph, with the types of the numbers.
    number_slots: Sequence[tuple[Slot, type]]
    device: torch.device
    #: Pyro's dict of parameters while the program was recorded.
    parameter_store: Mapping[str, Tensor]
    parameters: dict[str, Tensor]
    constants: list[Tensor]
    #: The slots in which the program stores the values of parameters, with the names of the parameters.
    parameter_slots: Sequence[tuple[Slot, str]] = ()
    #: Captures steps; None on a CPU.
    cuda_graphs: CudaGraphs | None = None
    #: The captured step; None before the first one.
    captured: CapturedStep | None = None
    #: Why steps cannot be captured, or the graph cannot be compiled; None if they can.
    fallback_reason: str | None = None
    uses: int = 0
    #: The time of the latest use, in seconds of ``time.perf_counter``.
    last_use: float = 0.0
    #: When the graph is compared with its program again, in seconds of ``time.perf_counter``.
    next_check: float = math.inf
    # The compiled code; None before it is compiled.
    _code: GraphFunction | None = None
    # Looks for code that a second process makes.
    _background: BackgroundCode | None = None
    # The latest arguments on a device that passed the guards, and their versions.
    _guarded: list[Tensor] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    def replay(
        self, call: Call, leaves: Leaves, compile_now: bool | None, options: Options
    ) -> LossEvaluation:
        """Evaluate the loss by the graph.

        :param compile_now: whether to compile the graph at once or never; None compiles it in the background.
        """
        if self._code is None and compile_now is not False:
            if compile_now:
                self._code = compile_at_once(self.graph, self.inputs(call, leaves), options)
                self.captured = None
            else:
                self._code = self._find_code(call, leaves, options)
        evaluation = self._take_captured_step(call, leaves)
        if evaluation is not None:
            return evaluation
        is_recorded = self._code in (None, self.graph.module)
        return self._run(call, leaves, Mode.RECORDED if is_recorded else Mode.COMPILED)

    def _find_code(self, call: Call, leaves: Leaves, options: Options) -> GraphFunction | None:
        """Return code from the background if it is ready, or the graph itself if there will be none, else None."""

        def tensors() -> list[Tensor]:
            return [*self.constants, *self.inputs(call, leaves)]

        try:
            if self._background is None:
                self._background = BackgroundCode(self.graph, tensors(), options)
            return self._background.code(tensors, self.uses)
        # Training goes on, whatever goes wrong beside it.
        except Exception as error:
            self.fallback_reason = f"a graph is not compiled: {first_line(error)}"
            warn(self.fallback_reason)
            return self.graph.module

    def rehearse(self, call: Call, leaves: Leaves) -> LossEvaluation:
        """Evaluate the recorded graph on the current noise, and change nothing."""
        with rehearsal():
            return self._run(call, leaves, Mode.RECORDED)

    def code_for(self, mode: Mode) -> GraphFunction:
        """Return the code of the graph, compiled or as it was recorded."""
        return self.graph.module if mode == Mode.RECORDED or self._code is None else self._code

    @torch.no_grad()
    def _run(self, call: Call, leaves: Leaves, mode: Mode) -> LossEvaluation:
        """Evaluate the loss by the graph, compiled or as it was recorded."""
        results = self.code_for(mode)(*self.constants, *self.inputs(call, leaves))
        return self._as_program(call, self.graph.result(results), mode)

    def _take_captured_step(self, call: Call, leaves: Leaves) -> LossEvaluation | None:
        """Take a captured step; if it cannot be captured, change nothing and return None."""
        optimizer = call.optimizer
        if self.cuda_graphs is None or optimizer is None or self.fallback_reason is not None:
            return None
        if self.captured is None or self.captured.optimizer is not optimizer:
            for tensor in (*self.constants, *leaves.tensors()):
                if tensor.device.type != self.device.type:
                    self._warn_uncaptured(
                        f"it takes a tensor on {tensor.device}, and parameters are on {self.device}"
                    )
                    return None
            self.captured = CapturedStep(self, call, optimizer, self.cuda_graphs)
            if self.captured.eager_optimizer_reason is not None:
                reason = self.captured.eager_optimizer_reason
                warn(f"the optimizer takes its step after the CUDA graph: {reason}")
        try:
            return self._as_program(call, self.captured(call, leaves), Mode.CAPTURED)
        except Refused as refused:
            self._warn_uncaptured(refused.reason)
            return None

    def _warn_uncaptured(self, reason: str) -> None:
        """Warn that steps are not captured, and remember the reason."""
        self.fallback_reason = reason
        warn(f"the program runs without a CUDA graph: {reason}")

    def numbers(self, call: Call, leaves: Leaves) -> list[Any]:
        """Return the numbers that the graph takes: the weight of the KL, then those of arguments and of the state."""
        of_arguments = [leaves.values[position] for position in self.positions]
        of_state = [slot.read() for slot, _ in self.number_slots]
        return [float(call.weight), *of_arguments, *of_state]

    def inputs(self, call: Call, leaves: Leaves) -> list[Tensor]:
        """Return all inputs of the graph but its constants: numbers as 0-d tensors, then tensors of arguments."""
        weight, *other_numbers = self.numbers(call, leaves)
        number_tensors = [number_tensor(number, self.device) for number in other_numbers]
        return [torch.full((), weight, device=self.device), *number_tensors, *leaves.tensors()]

    def is_valid(self, leaves: Leaves) -> bool:
        """Return whether the graph may be replayed: the state is unchanged, and the guards on argument values pass."""
        if stored_parameters() is not self.parameter_store or not self.is_state_valid():
            return False
        for slot, kind in self.number_slots:
            number = slot.read()
            if type(number) is not kind or not is_number(number):
                return False
        return self._are_guards_valid(leaves)

    def is_state_valid(self) -> bool:
        """Return whether the state is unchanged.

        Parameters and constants that were replaced by tensors of the same properties are replaced here too.
        """
        # The state takes over tensors that were replaced: its new list has the new ones in the same order.
        recorded_tensors = self.state.tensors
        if not self.state.is_valid():
            return False
        if self.state.tensors is not recorded_tensors:
            replacements = dict(zip(recorded_tensors, self.state.tensors, strict=True))
            self.parameters = {name: replacements.get(p, p) for name, p in self.parameters.items()}
            self.constants = [replacements.get(tensor, tensor) for tensor in self.constants]
        return True

    def _are_guards_valid(self, leaves: Leaves) -> bool:
        """Return whether the values that the program read from its arguments are those of the recorded run.

        A comparison waits for a device, so tensors there that passed at the previous call, and that operations have not
        changed since, are not compared again. In host memory NumPy may have changed them.
        """
        if self.graph.guards is None:
            return True
        tensors = leaves.tensors()
        versions = [tensor._version for tensor in tensors]
        on_device = all(tensor.device.type != "cpu" for tensor in tensors)
        if (
            on_device
            and versions == self._versions
            and all(map(operator.is_, tensors, self._guarded))
        ):
            return True
        if not self.graph.guards.match(tensors):
            return False
        self._guarded = tensors
        self._versions = versions
        return True

    def _as_program(
        self, call: Call, graph_evaluation: LossEvaluation, mode: Mode
    ) -> LossEvaluation:
        """Return a result of the graph as the program returns it: with parameters and scaled gradients.

        As the program would, this also writes the values of parameters to the slots in which the program stores them.
        """
        for slot, name in self.parameter_slots:
            slot.write(pyro.get_param_store()[name])
        gradients = graph_evaluation.gradients
        if call.gradient_scale != 1.0:
            gradients = tuple(
                None if gradient is None else gradient * call.gradient_scale
                for gradient in gradients
            )
        return graph_evaluation._replace(parameters=self.parameters, gradients=gradients, mode=mode)
