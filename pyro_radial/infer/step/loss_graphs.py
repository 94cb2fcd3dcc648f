# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Graphs of losses, found by what they depend on, and the fastest way to run each."""

import math
import warnings
from collections.abc import Hashable, Sequence
from itertools import chain

import torch
from torch import Tensor

from pyro_radial._pyro.compat import (
    handlers_around,
    post_accumulate_hooks,
    reader_of_setting,
)
from pyro_radial._pyro.random_numbers import TorchNoise, one_at_a_time
from pyro_radial.infer.step.captured import CapturedStep, CaptureError, Device, device_graphs
from pyro_radial.infer.step.inductor import GraphFunction, Options, agree, compile_once, has_code
from pyro_radial.infer.step.loss_evaluation import (
    CHECKED,
    COMPILED,
    JITTED,
    RECORDED,
    Call,
    LossEvaluation,
    evaluate_loss,
    is_differentiable,
)
from pyro_radial.infer.step.program_state import UnrecordableError
from pyro_radial.infer.step.recording import Recording, record_program, suspend_garbage_collection
from pyro_radial.infer.step.signature import Leaves, Numbers, descriptions, has_nan, kinds
from pyro_radial.infer.step.tensor_graph import ChangedTensors, restore_tensors

# A graph is compiled after this many uses on a CPU. Compiling takes seconds, and saves milliseconds at each use.
USES_BEFORE_COMPILING = 1000

# Steps in which the program runs as it is, and its graph beside it: these, and each of so many.
CHECKED_STEPS, CHECKED_EACH = (2, 10, 100), 1000
# The largest difference between both, relative to a result's norm, that counts as rounding.
MOST_DIFFERENCE = 1e-3

# Settings of Pyro that a graph fixes.
SETTINGS = (
    "module_local_params",
    "radial_kl_directions",
    "radial_kl_seed",
    "validate_distributions_pyro",
)
READ_SETTINGS = [reader_of_setting(name) for name in SETTINGS]

#: What decides on a graph: the program, and the descriptions of the leaves of its arguments.
Signature = tuple[Hashable, tuple[Hashable, ...]]


class Replay:
    """A recording, run faster after some uses: compiled, and on a device with graphs also captured."""

    def __init__(self, recording: Recording, device: Device | None = None) -> None:
        self.recording = recording
        #: Compiled code, once there is any.
        self.code: GraphFunction | None = None
        self.uses = 0
        #: The captured step, once there is one.
        self.captured: CapturedStep | None = None
        #: Why steps are not captured.
        self.uncaptured_reason: str | None = None
        self._device = device

    def __call__(
        self,
        call: Call,
        leaves: Leaves,
        compile_after: int | None,
        options: Options,
    ) -> LossEvaluation:
        """Evaluate the program on the leaves of its arguments.

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
        """Return what the graph gives as it was recorded, on the present noise, and leave all as it was."""
        noise = TorchNoise.now()
        changed = ChangedTensors()
        with changed:
            evaluation = self._run(self.recording.graph.module, call, leaves, RECORDED)
        restore_tensors(changed.originals)
        noise.restore()
        return evaluation

    @torch.no_grad()
    def _run(self, code: GraphFunction, call: Call, leaves: Leaves, mode: str) -> LossEvaluation:
        """Return what code for the graph gives."""
        recording = self.recording
        results = code(*recording.constants, *recording.inputs(call, leaves))
        return recording.evaluation_of_program(call, recording.graph.result(results), mode)

    @property
    def eager_optimizer_reason(self) -> str | None:
        """Why the optimizer takes its step after the captured graph, if it does."""
        return None if self.captured is None else self.captured.eager_optimizer_reason

    def _code_for(
        self,
        call: Call,
        leaves: Leaves,
        compile_after: int | None,
        options: Options,
    ) -> GraphFunction:
        """Return the compiled code, made when it is time, or the graph itself."""
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
        """Take a captured step; return None if there is no such step, and then nothing has changed."""
        if self._device is None or call.optimizer is None or self.uncaptured_reason is not None:
            return None
        if self.captured is None or not self.captured.is_of(call):
            device = self.recording.device
            for tensor in (*self.recording.constants, *leaves.tensors()):
                if tensor.device.type != device.type:
                    self._say(
                        f"it takes a tensor on {tensor.device}, and parameters are on {device}"
                    )
                    return None
            self.captured = CapturedStep(self.recording, code, call, call.optimizer, self._device)
            if self.eager_optimizer_reason is not None:
                text = f"the optimizer takes its step after the CUDA graph: {self.eager_optimizer_reason}"
                warnings.warn(text, stacklevel=6)
        try:
            return self.captured(call, leaves)
        except CaptureError as error:
            self._say(str(error))
            return None

    def _say(self, reason: str) -> None:
        self.uncaptured_reason = reason
        warnings.warn(f"the program runs without a CUDA graph: {reason}", stacklevel=7)


class Graphs:
    """Evaluate losses by graphs.

    For each signature of the arguments the program runs once as usual, so that it raises its usual errors, is recorded,
    and is replayed from then on. A program that cannot be recorded runs as usual each time, after one warning.
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
        # By signature, the latest in use first.
        self._replays: dict[Signature, list[Replay]] = {}
        # The numbers of each program and tree of arguments that are inputs of its graphs, with the program, whose ids
        # the keys hold.
        self._numbers: dict[Hashable, tuple[Numbers, object]] = {}
        # The kinds of arguments with which programs cannot be recorded, which takes long to find out.
        self._unrecordable: set[Hashable] = set()
        # The kinds of arguments with which a first run could not be recorded, but another one may be.
        self._failed_once: set[Hashable] = set()
        # The signatures of graphs that were not right.
        self._dropped: set[Signature] = set()
        self._calls = 0
        #: The uses of a graph before it is compiled; by default 1,000 on a CPU, and none where steps are captured.
        self.compile_after: int | None = None
        #: What captures steps; None if nothing does.
        self._device = device
        #: Why programs run without a graph; empty if all have one.
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
            self._say(str(error))
            return _run_as_it_is(call)
        if key not in self._replays and numbers.notice(leaves.values):
            self._drop_graphs(program)
            key = program, descriptions(leaves.values, numbers.positions)
        replay = self._find_replay(key, numbers, call, leaves)
        if not isinstance(replay, Replay):
            return _run_as_it_is(call) if replay is None else replay
        self._calls += call.gradients
        if call.gradients and _is_checked(call.step or self._calls):
            replayed = replay.rehearse(call, leaves)
            # A loss that is not finite is an error of its own.
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
        """The recordings, by signature."""
        return [replay.recording for replay in self.replays]

    @property
    def uncaptured_reasons(self) -> list[str]:
        """Why steps, or the part of the optimizer, are in no CUDA graph, where there could be one."""
        reasons: list[str] = []
        for replay in self.replays:
            reason = replay.uncaptured_reason or replay.eager_optimizer_reason
            if reason is not None and reason not in reasons:
                reasons.append(reason)
        return reasons

    @property
    def replays(self) -> list[Replay]:
        """How each graph runs."""
        return list(chain.from_iterable(self._replays.values()))

    def _must_run_as_it_is(self, call: Call) -> bool:
        """Return whether there can be no graph of a loss, whatever the program."""
        if handlers_around():
            return True
        if not is_differentiable(call.loss):
            name = type(call.loss).__name__
            compiled_itself = f"compiles it itself, more slowly; use {name.removeprefix('Jit')}"
            own_gradients = "computes its gradients in loss_and_grads, not in differentiable_loss"
            self._say(
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
        """Return a recording that holds, perhaps a new one.

        For a program that cannot be recorded, return what its first run gave, and later None.
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
            self._say(self._too_many(replays))
            return None
        return self._record(key[0], numbers, call, leaves)

    def _record(
        self, program: Hashable, numbers: Numbers, call: Call, leaves: Leaves
    ) -> Replay | LossEvaluation | None:
        """Return a new recording; if there can be none, what the program's first run gave, or None to run it."""
        program_and_kinds = program, kinds(leaves.values)
        with one_at_a_time(), suspend_garbage_collection():
            attempt = record_program(call, leaves, numbers)
        if attempt.recording is None:
            if attempt.may_try_again and program_and_kinds not in self._failed_once:
                self._failed_once.add(program_and_kinds)
            else:
                self._unrecordable.add(program_and_kinds)
                self._say(attempt.reason, stacklevel=7)
            return attempt.evaluation
        if self._device is None:
            self._device = device_graphs(attempt.recording.device)
        replay = Replay(attempt.recording, self._device if self.compile else None)
        try:
            replayed = replay.rehearse(call, leaves)
        except RuntimeError as error:
            reason = f"torch can record it, but not replay it: {error}".splitlines()[0]
            self._say(reason, stacklevel=7)
            self._unrecordable.add(program_and_kinds)
            return None
        if numbers and _largest_difference(replayed, attempt.evaluation) is not None:
            # A program that asks for the type of a number gives something else for a tensor.
            numbers.give_up_all()
            return self._record(program, numbers, call, leaves)
        # Python may have read numbers that were inputs, which are part of the signature then.
        key = program, descriptions(leaves.values, numbers.positions)
        self._replays.setdefault(key, []).insert(0, replay)
        return replay

    def _check_against_program(
        self, replay: Replay, key: Signature, call: Call, leaves: Leaves, replayed: LossEvaluation
    ) -> LossEvaluation:
        """Run the program as it is, and drop its graph if that gives something else."""
        evaluation = _run_as_it_is(call._replace(attached=False))
        difference = _largest_difference(replayed, evaluation)
        if difference is None:
            return evaluation._replace(mode=CHECKED)
        self._replays[key].remove(replay)
        if key in self._dropped:
            self._unrecordable.add((key[0], kinds(leaves.values)))
            self._say(f"its graph gives something else than the program, at {difference}")
            return evaluation
        self._dropped.add(key)
        warnings.warn(
            f"a graph gave something else than its program, at {difference}, because of a change that could not be "
            "seen; it is recorded again. Pass what changes as an argument, or keep it in a buffer",
            stacklevel=6,
        )
        return evaluation

    def _too_many(self, replays: Sequence[Replay]) -> str:
        """Return the reason for no other graph."""
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

    def _say(self, reason: str, stacklevel: int = 6) -> None:
        """Warn that a program runs uncompiled, once for each reason."""
        if reason not in self.eager_reasons:
            self.eager_reasons.append(reason)
            warnings.warn(f"the program runs uncompiled: {reason}", stacklevel=stacklevel)


def _run_as_it_is(call: Call) -> LossEvaluation:
    """Run the program as usual."""
    with one_at_a_time():
        return evaluate_loss(call._replace(optimizer=None))


def _is_checked(step: int) -> bool:
    """Return whether the program itself runs in a step, counted from one."""
    return step in CHECKED_STEPS or step % CHECKED_EACH == 0


def _largest_difference(replayed: LossEvaluation, evaluation: LossEvaluation) -> str | None:
    """Return the site or parameter where a graph is furthest from its program, or None if they agree."""
    program_gradients = dict(zip(evaluation.parameters, evaluation.gradients, strict=True))
    # What is compared, by name.
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
                # A site says more than what its term adds to.
                if _relative_distance(replayed_terms[name], program_terms[name]) > MOST_DIFFERENCE:
                    return f"site '{name}'"
    return max(
        replayed_values,
        key=lambda label: _relative_distance(replayed_values[label], program_values[label]),
    )


def _relative_distance(value: Tensor, reference: Tensor) -> float:
    """Return the norm of a difference, relative to a norm; a NaN is furthest."""
    distance = float(
        (value.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
    )
    return math.inf if math.isnan(distance) else distance


def _program_key(call: Call, leaves: Leaves) -> Hashable:
    """Return what decides on a graph, besides the leaves of the arguments and the state that the program reads."""
    ids: tuple[object, ...] = (
        id(call.model),
        id(call.guide),
        id(call.loss),
        id(call.graph_optimizer),
    )
    if call.graph_optimizer is not None:
        site_parameters = call.graph_optimizer.param_groups[0]["params"]
        ids += tuple(map(bool, map(post_accumulate_hooks, site_parameters)))
    weighted = call.weight == 0.0
    return ids, leaves.tree, call.gradients, weighted, settings_now()


def settings_now() -> tuple[object, ...]:
    """Return the settings of torch and Pyro that a graph fixes."""
    settings: list[object] = []
    for kind in ("cpu", "cuda"):
        settings += torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    settings.append(torch.get_default_dtype())
    for read in READ_SETTINGS:
        settings.append(read())
    return tuple(settings)
