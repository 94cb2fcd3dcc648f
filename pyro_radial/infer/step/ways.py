# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The ways to run a recorded program: as it was recorded, compiled, or captured with the step of the optimizer."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial.infer.step.captured import Captured, CaptureError, Device
from pyro_radial.infer.step.compiled import Code, compiled, has_code
from pyro_radial.infer.step.evaluate import COMPILED, RECORDED, Call, Evaluation
from pyro_radial.infer.step.recording import Recording

__all__ = ["Way"]


class Way:
    """Run a recording, faster after some uses: compiled, and on a device with graphs also captured."""

    def __init__(self, recording: Recording, device: Device | None = None) -> None:
        self.recording = recording
        #: Compiled code, once there is any.
        self.code: Code | None = None
        self.uses = 0
        #: The captured step, once there is one.
        self.captured: Captured | None = None
        #: Why steps are not captured.
        self.uncaptured_because: str | None = None
        self._device = device

    def __call__(
        self, call: Call, leaves: Sequence[Any], compile_after: int | None, options: Mapping[str, Any]
    ) -> Evaluation:
        """Evaluate the program on the leaves of its arguments.

        :param compile_after: the uses before the graph is compiled; None never compiles it.
        """
        recording, tensors = self.recording, [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        code = self._code_for(call, tensors, compile_after, options)
        found = self._captured_step(call, tensors, code)
        if found is not None:
            return found
        weight = torch.full((), float(call.weight), device=recording.device)
        if call.mover is not None:
            call.mover.write_rates()
        with torch.no_grad():
            results = recording.graph.result(code(*recording.constant_tensors(), weight, *tensors))
        return recording.evaluation(call, results, RECORDED if self.code is None else COMPILED)

    def _code_for(
        self, call: Call, tensors: list[Tensor], compile_after: int | None, options: Mapping[str, Any]
    ) -> Code:
        """The compiled code, made when it is time, or the graph itself."""
        if self.code is None and compile_after is not None:
            self.uses += 1
            graph = self.recording.graph
            inputs = [torch.full((), float(call.weight), device=self.recording.device), *tensors]
            if self.uses > compile_after or has_code(graph, inputs, options):
                self.code = compiled(graph, inputs, options)
                self.captured = None
        return self.recording.graph.module if self.code is None else self.code

    def _captured_step(self, call: Call, tensors: Sequence[Tensor], code: Code) -> Evaluation | None:
        """A captured step; None if there is no such step, and then nothing has changed."""
        if self._device is None or call.optimizer is None or self.uncaptured_because is not None:
            return None
        if self.captured is None or not self.captured.is_of(call):
            kind = self.recording.device.type
            read = [*self.recording.constant_tensors(), *tensors]
            other = next((tensor.device for tensor in read if tensor.device.type != kind), None)
            if other is not None:
                self._say(f"it takes a tensor on {other}, and parameters are on {self.recording.device}")
                return None
            self.captured = Captured(self.recording, code, call.optimizer, self._device)
            outside = self.captured.outside_because
            if outside is not None:
                warnings.warn(f"the optimizer takes its step after the CUDA graph: {outside}", stacklevel=6)
        try:
            return self.captured(call, tensors)
        except CaptureError as error:
            self._say(str(error))
            return None

    def _say(self, reason: str) -> None:
        self.uncaptured_because = reason
        warnings.warn(f"the program runs without a CUDA graph: {reason}", stacklevel=7)
