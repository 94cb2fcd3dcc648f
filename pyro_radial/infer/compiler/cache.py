# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Evaluate losses by recorded graphs: find the graph for a call, record new ones, check and compile them."""

import math
from collections.abc import Hashable, Sequence
from itertools import chain

import torch
from torch import Tensor

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import (
    handlers_around,
    post_accumulate_hooks,
    reader_of_setting,
)
from pyro_radial._pyro.random_numbers import TorchNoise, one_at_a_time
from pyro_radial.infer.compiler.cuda import CapturedStep, CaptureError, Device, device_graphs
from pyro_radial.infer.compiler.inductor import (
    GraphFunction,
    Options,
    agree,
    compile_once,
    has_code,
)
from pyro_radial.infer.compiler.program import Recording, record_program, suspend_garbage_collection
from pyro_radial.infer.compiler.signature import Leaves, Numbers, descriptions, has_nan, kinds
from pyro_radial.infer.compiler.state import UnrecordableError
from pyro_radial.infer.compiler.tensor_graph import ChangedTensors, restore_tensors
from pyro_radial.infer.step.evaluation import (
    CHECKED,
    COMPILED,
    JITTED,
    RECORDED,
    Call,
    LossEvaluation,
    evaluate_loss,
    is_differentiable,
)

# A graph is compiled after this many uses on a CPU. Compiling takes seconds, and saves milliseconds at each use.
USES_BEFORE_COMPILING = 1000

# The program runs in these steps, and in every 1000th, to check its graph.
CHECKED_STEPS, CHECKED_EACH = (2, 10, 100), 1000
# The largest difference between program and graph, relative to a result's norm, that counts as rounding.
MOST_DIFFERENCE = 1e-3

# Settings of Pyro at the time of the recording, which a graph cannot read later.
SETTINGS = (
    "module_local_params",
    "radial_kl_directions",
    "radial_kl_seed",
    "validate_distributions_pyro",
)
READ_SETTINGS = [reader_of_setting(name) for name in SETTINGS]

#: The key of a graph: that of the program, and the descriptions of the leaves of its arguments.
Signature = tuple[Hashable, tuple[Hashable, ...]]


class Replay:
    """Replay a recording: as recorded at first, compiled after some uses, and on a GPU as a captured CUDA graph."""

    def __init__(self, recording: Recording, device: Device | None = None) -> None:
        self.recording = recording
        #: The compiled code; None before it is compiled.
        self.code: GraphFunction | None = None
        self.uses = 0
        #: The captured step; None before the first one.
        self.captured: CapturedStep | None = None
        #: Why steps cannot be captured; None if they can.
        self.uncaptured_reason: str | None = None
        self._device = device

    def __call__(
        self,
        call: Call,
        leaves: Leaves,
        compile_after: int | None,
        options: Options,
    ) -> LossEvaluation:
        """Evaluate the loss by the graph.

        :param compile_after: the uses before the graph is compiled; None never compiles it.
        """
        code = self._code_for(call, leaves, compile_after, options)
        evaluation = self._take_captured_step(call, leaves, code)
        if evaluation is not None:
            return evaluation
        if call.graph_optimizer is not None:
            call.graph_optimizer.write_rates()
        return self._run(code, call, leaves, RECORDED if self.code is None else COMPILED)

    def rehearse(self, call: Call, leaves: Leaves) -> LossEvaluation:
        """Evaluate the recorded graph on the current noise, then restore the tensors that it changed and the noise."""
        noise = TorchNoise.current()
        changed = ChangedTensors()
        with changed:
            evaluation = self._run(self.recording.graph.module, call, leaves, RECORDED)
        restore_tensors(changed.originals)
        noise.restore()
        return evaluation

    @torch.no_grad()
    def _run(self, code: GraphFunction, call: Call, leaves: Leaves, mode: str) -> LossEvaluation:
        """Evaluate the loss by code for the graph: compiled code, or the graph as it was recorded."""
        recording = self.recording
        results = code(*recording.constants, *recording.inputs(call, leaves))
        return recording.evaluation_of_program(call, recording.graph.result(results), mode)

    @property
    def eager_optimizer_reason(self) -> str | None:
        """Why the optimizer takes its step after the captured graph; None if the graph takes it."""
        return None if self.captured is None else self.captured.eager_optimizer_reason

    def _code_for(
        self,
        call: Call,
        leaves: Leaves,
        compile_after: int | None,
        options: Options,
    ) -> GraphFunction:
        """Count a use, and return the compiled code, or the graph as it was recorded before it is compiled."""
        if self.code is None and compile_after is not None:
            self.uses += 1
            graph = self.recording.graph
            inputs = self.recording.inputs(call, leaves)
            if self.uses > compile_after or has_code(graph, inputs, options):
                self.code = compile_once(graph, inputs, options)
                self.captured = None
        return self.recording.graph.module if self.code is None else self.code

    def _take_captured_step(
        self, call: Call, leaves: Leaves, code: GraphFunction
    ) -> LossEvaluation | None:
        """Take a captured step; if it cannot be captured, change nothing and return None."""
        if self._device is None or call.optimizer is None or self.uncaptured_reason is not None:
            return None
        if self.captured is None or not self.captured.is_of(call):
            device = self.recording.device
            for tensor in (*self.recording.constants, *leaves.tensors()):
                if tensor.device.type != device.type:
                    self._warn_uncaptured(
                        f"it takes a tensor on {tensor.device}, and parameters are on {device}"
                    )
                    return None
            self.captured = CapturedStep(self.recording, code, call, call.optimizer, self._device)
            if self.eager_optimizer_reason is not None:
                text = f"the optimizer takes its step after the CUDA graph: {self.eager_optimizer_reason}"
                warn(text)
        try:
            return self.captured(call, leaves)
        except CaptureError as error:
            self._warn_uncaptured(str(error))
            return None

    def _warn_uncaptured(self, reason: str) -> None:
        """Warn that steps are not captured, and remember the reason."""
        self.uncaptured_reason = reason
        warn(f"the program runs without a CUDA graph: {reason}")


class Graphs:
    """Evaluate losses by graphs.

    For each signature of its arguments, a program first runs once as usual, so that it raises its usual errors. Then it
    is recorded, and later calls replay the graph. A program that cannot be recorded runs as usual each time, after one
    warning.
    """

    def __init__(
        self,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        options: Options | None = None,
        device: Device | None = None,
    ) -> None:
        self.compile = compile
        self.max_signatures = max_signatures
        self.options = dict(options or {})
        # The replays of each signature, which differ in their state; the latest in use comes first.
        self._replays: dict[Signature, list[Replay]] = {}
        # The numbers that are inputs of each program's graphs, with its model, guide and loss. These are kept alive
        # because the keys contain their ids.
        self._numbers: dict[Hashable, tuple[Numbers, object]] = {}
        # The programs and kinds of arguments that cannot be recorded, remembered because an attempt takes long.
        self._unrecordable: set[Hashable] = set()
        # The programs and kinds of arguments whose first run could not be recorded, but a second one may be.
        self._failed_once: set[Hashable] = set()
        # The signatures of graphs that gave a wrong result once.
        self._dropped: set[Signature] = set()
        self._calls = 0
        #: The uses of a graph before it is compiled; None for 1,000 on a CPU and zero where steps are captured.
        self.compile_after: int | None = None
        # Captures steps; None before the first recording, and on a CPU.
        self._device = device
        #: The reasons why programs run without a graph; empty if all have one.
        self.eager_reasons: list[str] = []

    def __call__(self, call: Call, *, compile_now: bool | None = None) -> LossEvaluation:
        """Evaluate a loss.

        :param compile_now: whether to compile the graph at its first use or never, instead of after many uses.
        """
        if self._must_run_as_it_is(call):
            return _run_as_it_is(call)
        leaves = Leaves.of(call.args, call.kwargs)
        if has_nan(leaves.values):
            return _run_as_it_is(call)
        program = _program_key(call, leaves)
        numbers = self._numbers_of(program, call)
        try:
            key = program, descriptions(leaves.values, numbers.positions)
        except UnrecordableError as error:
            self._warn_eager(str(error))
            return _run_as_it_is(call)
        if key not in self._replays and numbers.notice_values(leaves.values):
            self._drop_graphs(program)
            key = program, descriptions(leaves.values, numbers.positions)
        replay = self._find_replay(key, numbers, call, leaves)
        if not isinstance(replay, Replay):
            return _run_as_it_is(call) if replay is None else replay
        self._calls += call.gradients
        if call.gradients and _is_checked(call.step or self._calls):
            replayed = replay.rehearse(call, leaves)
            # A loss that is not finite raises its own error, so nothing is compared.
            if not bool(replayed.nonfinite):
                return self._check_against_program(replay, key, call, leaves, replayed)
        return replay(call, leaves, self._uses_before_compiling(compile_now), self.options)

    def _uses_before_compiling(self, compile_now: bool | None) -> int | None:
        """Return the uses before a graph is compiled; None never compiles it."""
        if not self.compile or compile_now is False:
            return None
        if compile_now:
            return 0
        if self.compile_after is not None:
            return self.compile_after
        return USES_BEFORE_COMPILING if self._device is None else 0

    @property
    def recordings(self) -> list[Recording]:
        """The recording of each graph."""
        return [replay.recording for replay in self.replays]

    @property
    def uncaptured_reasons(self) -> list[str]:
        """The reasons why steps, or the optimizer's part of them, are not in a CUDA graph on a GPU."""
        reasons: list[str] = []
        for replay in self.replays:
            reason = replay.uncaptured_reason or replay.eager_optimizer_reason
            if reason is not None and reason not in reasons:
                reasons.append(reason)
        return reasons

    @property
    def replays(self) -> list[Replay]:
        """All replays, one for each graph."""
        return list(chain.from_iterable(self._replays.values()))

    def _must_run_as_it_is(self, call: Call) -> bool:
        """Return whether no program can have a graph here: inside of other handlers, or with this loss."""
        if handlers_around():
            return True
        if not is_differentiable(call.loss):
            name = type(call.loss).__name__
            compiled_itself = f"compiles it itself, more slowly; use {name.removeprefix('Jit')}"
            own_gradients = "computes its gradients in loss_and_grads, not in differentiable_loss"
            self._warn_eager(
                f"{name} {compiled_itself if isinstance(call.loss, JITTED) else own_gradients}"
            )
            return True
        return False

    def _numbers_of(self, program: Hashable, call: Call) -> Numbers:
        """Return the numbers that are inputs of a program's graphs."""
        if program not in self._numbers:
            self._numbers[program] = Numbers(), (call.model, call.guide, call.loss)
        return self._numbers[program][0]

    def _drop_graphs(self, program: Hashable) -> None:
        """Drop the graphs of a program, because a number has become an input."""
        for key in list(self._replays):
            if key[0] == program:
                del self._replays[key]

    def _find_replay(
        self, key: Signature, numbers: Numbers, call: Call, leaves: Leaves
    ) -> Replay | LossEvaluation | None:
        """Return a valid replay for a call: an existing one, or a new one after a recording.

        If the program cannot be recorded, return the evaluation of the run that was tried, or None if none was tried.
        """
        replays = self._replays.get(key, [])
        for position, replay in enumerate(replays):
            if replay.recording.is_valid(leaves):
                if position:
                    replays.insert(0, replays.pop(position))
                return replay
        program_and_kinds = key[0], kinds(leaves.values)
        if program_and_kinds in self._unrecordable:
            return None
        for replay in replays:
            if numbers.notice_paths(replay.recording.state.changed_numbers()):
                self._drop_graphs(key[0])
        if len(self.recordings) >= self.max_signatures:
            self._warn_eager(self._reason_for_limit(replays))
            return None
        return self._record(key[0], numbers, call, leaves)

    def _record(
        self, program: Hashable, numbers: Numbers, call: Call, leaves: Leaves
    ) -> Replay | LossEvaluation | None:
        """Record a program, and return its replay.

        If it cannot be recorded, return the evaluation of its usual run, or None if the program must run again.
        """
        program_and_kinds = program, kinds(leaves.values)
        with one_at_a_time(), suspend_garbage_collection():
            attempt = record_program(call, leaves, numbers)
        if attempt.recording is None:
            if attempt.may_try_again and program_and_kinds not in self._failed_once:
                self._failed_once.add(program_and_kinds)
            else:
                self._unrecordable.add(program_and_kinds)
                self._warn_eager(attempt.reason)
            return attempt.evaluation
        if self._device is None:
            self._device = device_graphs(attempt.recording.device)
        replay = Replay(attempt.recording, self._device if self.compile else None)
        try:
            replayed = replay.rehearse(call, leaves)
        except RuntimeError as error:
            reason = f"torch can record it, but not replay it: {error}".splitlines()[0]
            self._warn_eager(reason)
            self._unrecordable.add(program_and_kinds)
            return None
        if numbers and _largest_difference(replayed, attempt.evaluation) is not None:
            # The program may test the type of a number, and compute something else for a tensor.
            numbers.exclude_all()
            return self._record(program, numbers, call, leaves)
        # Numbers that Python has read during the recording are now part of the signature.
        key = program, descriptions(leaves.values, numbers.positions)
        self._replays.setdefault(key, []).insert(0, replay)
        return replay

    def _check_against_program(
        self, replay: Replay, key: Signature, call: Call, leaves: Leaves, replayed: LossEvaluation
    ) -> LossEvaluation:
        """Run the program as it is, return this result, and drop the graph if its result was different.

        After a second wrong graph the program is not recorded again.

        :param replayed: the graph's result on the same noise.
        """
        evaluation = _run_as_it_is(call._replace(attached=False))
        difference = _largest_difference(replayed, evaluation)
        if difference is None:
            return evaluation._replace(mode=CHECKED)
        self._replays[key].remove(replay)
        if key in self._dropped:
            self._unrecordable.add((key[0], kinds(leaves.values)))
            self._warn_eager(f"its graph gives something else than the program, at {difference}")
            return evaluation
        self._dropped.add(key)
        warn(
            f"a graph gave something else than its program, at {difference}, because of a change that could not be "
            "seen; it is recorded again. Pass what changes as an argument, or keep it in a buffer"
        )
        return evaluation

    def _reason_for_limit(self, replays: Sequence[Replay]) -> str:
        """Return the reason why the limit of ``max_signatures`` graphs is reached: what keeps changing."""
        if not replays:
            return (
                f"its arguments are of more than max_signatures = {self.max_signatures} kinds (shapes, strides, "
                "dtypes, devices, and values that are not tensors); use batches of one shape, pass changing numbers as "
                "tensors, or raise max_signatures"
            )
        state = replays[0].recording.state
        changes = state.changes()
        if not changes:
            return (
                "values that it reads from its arguments keep changing, and there are max_signatures = "
                f"{self.max_signatures} graphs; use torch.where, or raise max_signatures"
            )
        path, _ = changes[0]
        return (
            f"{path} keeps changing{state.code.line_of(path)}, and there are max_signatures = {self.max_signatures} "
            "graphs; pass it as a tensor, keep it in a buffer, or raise max_signatures"
        )

    def _warn_eager(self, reason: str) -> None:
        """Warn that a program runs uncompiled, once for each reason, and remember the reason."""
        if reason not in self.eager_reasons:
            self.eager_reasons.append(reason)
            warn(f"the program runs uncompiled: {reason}")


def _run_as_it_is(call: Call) -> LossEvaluation:
    """Evaluate the loss without a graph."""
    with one_at_a_time():
        return evaluate_loss(call._replace(optimizer=None))


def _is_checked(step: int) -> bool:
    """Return whether the graph is compared with its program in a step, counted from one."""
    return step in CHECKED_STEPS or step % CHECKED_EACH == 0


def _largest_difference(replayed: LossEvaluation, evaluation: LossEvaluation) -> str | None:
    """Return the site or gradient with the largest difference between graph and program, or None if they agree."""
    program_gradients = dict(zip(evaluation.parameters, evaluation.gradients, strict=True))
    # The values to compare, by a label for messages.
    replayed_values = {"the loss": replayed.loss}
    program_values = {"the loss": evaluation.loss}
    for (name, parameter), gradient in zip(
        replayed.parameters.items(), replayed.gradients, strict=True
    ):
        if id(parameter) in replayed.updated_in_graph:
            continue
        program_gradient = program_gradients.get(name)
        label = f"the gradient of {name}"
        replayed_values[label] = torch.zeros_like(parameter) if gradient is None else gradient
        program_values[label] = (
            torch.zeros_like(parameter) if program_gradient is None else program_gradient
        )
    if agree(list(replayed_values.values()), list(program_values.values()), MOST_DIFFERENCE):
        return None
    if replayed.terms is not None and evaluation.terms is not None:
        for kind in ("nll_by_site", "kl_by_site"):
            replayed_terms = getattr(replayed.terms, kind)
            program_terms = getattr(evaluation.terms, kind)
            for name in replayed_terms.keys() & program_terms.keys():
                # The name of a site tells more than that of the loss or a gradient.
                if _relative_distance(replayed_terms[name], program_terms[name]) > MOST_DIFFERENCE:
                    return f"site '{name}'"
    return max(
        replayed_values,
        key=lambda label: _relative_distance(replayed_values[label], program_values[label]),
    )


def _relative_distance(value: Tensor, reference: Tensor) -> float:
    """Return the norm of a difference, relative to the reference's norm; infinite for NaN."""
    distance = float(
        (value.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
    )
    return math.inf if math.isnan(distance) else distance


def _program_key(call: Call, leaves: Leaves) -> Hashable:
    """Return the part of a graph's key that depends on the model, guide, loss and settings, not on arguments."""
    ids: tuple[object, ...] = (
        id(call.model),
        id(call.guide),
        id(call.loss),
        id(call.graph_optimizer),
    )
    if call.graph_optimizer is not None:
        site_parameters = call.graph_optimizer.param_groups[0]["params"]
        ids += tuple(map(bool, map(post_accumulate_hooks, site_parameters)))
    has_no_kl = call.weight == 0.0
    return ids, leaves.tree, call.gradients, has_no_kl, settings_now()


def settings_now() -> tuple[object, ...]:
    """Return the current settings of torch and Pyro that a graph fixes when it is recorded."""
    settings: list[object] = []
    for kind in ("cpu", "cuda"):
        settings += torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    settings.append(torch.get_default_dtype())
    for read in READ_SETTINGS:
        settings.append(read())
    return tuple(settings)
