# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Evaluate losses by recorded graphs: find the graph for a call, record new ones, check and compile them."""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter
from types import MethodType
from typing import Any

import torch

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import (
    handlers_around,
    num_global_hooks,
    reader_of_setting,
)
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.compiler.cuda import CudaGraphs, device_graphs
from pyro_radial.infer.compiler.inductor import (
    Options,
    relative_difference,
)
from pyro_radial.infer.compiler.program import Program
from pyro_radial.infer.compiler.recording import (
    record_program,
    suspend_garbage_collection,
    terms_by_site,
)
from pyro_radial.infer.compiler.signature import Leaves, Numbers, descriptions, kinds
from pyro_radial.infer.compiler.state import IdentityMap, Refused
from pyro_radial.infer.compiler.tensor_graph import rehearsal
from pyro_radial.infer.step.evaluation import (
    Call,
    LossEvaluation,
    evaluate_loss,
    why_not_differentiable,
)

# A graph is compared with its program at these uses, and whenever comparisons have taken less than this share of the
# time.
CHECKED_USES, CHECKED_SHARE = (2, 10, 100), 0.01
# The largest difference between program and graph, relative to a result's norm, that counts as rounding.
MOST_DIFFERENCE = 1e-3

# Above the limit of graphs, a new one replaces the one that was not used for longest: at first, for so many recordings
# for each graph, and then while recordings have taken less than this share of the time.
FREE_RECORDINGS, RECORDING_SHARE = 2, 0.1

# Settings of Pyro at the time of the recording, which a graph cannot read later.
SETTINGS = (
    "module_local_params",
    "radial_kl_directions",
    "radial_kl_seed",
    "validate_distributions_pyro",
)
READ_SETTINGS = list(map(reader_of_setting, SETTINGS))

#: The key of a graph: that of the program, and the descriptions of the leaves of its arguments.
Signature = tuple[tuple[Hashable, ...], tuple[Hashable, ...]]


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
    ) -> None:
        self.compile = compile
        self.max_signatures = max_signatures
        self.options = dict(options or {})
        # The programs of each signature, which differ in their state; the latest in use comes first.
        self._programs: dict[Signature, list[Program]] = {}
        # The numbers that are inputs of each program's graphs.
        self._numbers: defaultdict[Hashable, Numbers] = defaultdict(Numbers)
        # What stands for each object in the keys of programs.
        self._identities = IdentityMap()
        # The programs and kinds of arguments that cannot be recorded, remembered because an attempt takes long.
        self._unrecordable: set[Hashable] = set()
        # The programs and kinds of arguments whose first run could not be recorded, but a second one may be.
        self._failed_once: set[Hashable] = set()
        # The signatures of graphs that gave a wrong result once.
        self._dropped: set[Signature] = set()
        self._started = perf_counter()
        self._num_recordings = 0
        self._recording_seconds = 0.0
        #: Whether to compile a graph at its first use or never; None compiles it in the background, where steps are not
        #: captured.
        self.compile_now: bool | None = None
        # Captures steps; None before the first recording, and on a CPU.
        self._device: CudaGraphs | None = None
        #: The reasons why programs run without a graph; empty if all have one.
        self.eager_reasons: list[str] = []

    def __reduce__(self) -> Any:
        """Copy and save only the settings; a copy records its own graphs."""
        make = partial(
            Graphs, compile=self.compile, max_signatures=self.max_signatures, options=self.options
        )
        return make, ()

    def __call__(self, call: Call, *, compile_now: bool | None = None) -> LossEvaluation:
        """Evaluate a loss.

        :param compile_now: whether to compile the graph at its first use or never, instead of in the background.
        """
        try:
            _check_surroundings(call)
            leaves = Leaves.of(call.args, call.kwargs)
            # NaN equals no number, so no graph would match.
            if any(type(value) is float and math.isnan(value) for value in leaves.values):
                return _run_as_it_is(call)
            program_key = self._program_key(call, leaves)
            numbers = self._numbers[program_key]
            if numbers.notice_values(leaves.values):
                self._drop_graphs(partial(operator.eq, program_key))
            key = program_key, descriptions(leaves.values, numbers.positions)
        except Refused as refused:
            self._warn_eager(refused.reason)
            return _run_as_it_is(call)
        program = self._find_program(key, numbers, call, leaves)
        if not isinstance(program, Program):
            return _run_as_it_is(call) if program is None else program
        program.uses += 1
        program.last_use = perf_counter()
        is_due = program.uses in CHECKED_USES or program.last_use > program.next_check
        if is_due and self._is_wrong(program, key, call, leaves):
            return _run_as_it_is(call)
        if compile_now is None:
            compile_now = self.compile_now
        if compile_now is None and (self._device is not None or program.device.type != "cpu"):
            compile_now = True
        return program.replay(call, leaves, self.compile and compile_now, self.options)

    @property
    def programs(self) -> list[Program]:
        """The recorded programs, one for each graph."""
        return list(chain.from_iterable(self._programs.values()))

    @property
    def fallback_reasons(self) -> list[str]:
        """The reasons why graphs are not compiled, or why steps or the optimizer's part are not in a CUDA graph."""
        reasons: list[str] = []
        for program in self.programs:
            reason = program.fallback_reason
            if reason is None and program.captured is not None:
                reason = program.captured.eager_optimizer_reason
            if reason is not None and reason not in reasons:
                reasons.append(reason)
        return reasons

    def _program_key(self, call: Call, leaves: Leaves) -> tuple[Hashable, ...]:
        """Return the part of a graph's key that depends on the model, guide, loss and settings, not on arguments."""
        return (
            tuple(map(self._identity, (call.model, call.guide, call.loss))),
            leaves.tree,
            call.gradients,
            call.weight == 0.0,
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            *num_global_hooks(),
            *map(operator.call, READ_SETTINGS),
        )

    def _identity(self, program: object) -> Hashable:
        """Return what stands for an object in keys; methods of the same function and object are the same."""
        if isinstance(program, MethodType):
            return self._identity(program.__func__), self._identity(program.__self__)
        return self._identities.setdefault(program, object())

    def _drop_graphs(self, is_dropped: Callable[[tuple[Hashable, ...]], bool]) -> None:
        """Drop the graphs of the programs with these keys."""
        for key in list(self._programs):
            if is_dropped(key[0]):
                del self._programs[key]

    def _find_program(
        self, key: Signature, numbers: Numbers, call: Call, leaves: Leaves
    ) -> Program | LossEvaluation | None:
        """Return a valid program for a call: a recorded one, or a new one after a recording.

        If it cannot be recorded, return the evaluation of the run that was tried, or None if none was tried.
        """
        programs = self._programs.get(key, [])
        for position, program in enumerate(programs):
            if program.is_valid(leaves):
                if position:
                    programs.insert(0, programs.pop(position))
                return program
        if (key[0], kinds(leaves.values)) in self._unrecordable:
            return None
        for program in programs:
            if numbers.notice_paths(program.state.changed_numbers()):
                self._drop_graphs(partial(operator.eq, key[0]))
        if len(self.programs) >= self.max_signatures:
            seconds = perf_counter() - self._started
            is_at_first = self._num_recordings < FREE_RECORDINGS * self.max_signatures
            if not is_at_first and self._recording_seconds >= RECORDING_SHARE * seconds:
                self._warn_eager(self._reason_for_limit(programs, leaves))
                return None
            self._drop_least_recent()
        started = perf_counter()
        recorded = self._record(key[0], numbers, call, leaves)
        self._num_recordings += 1
        self._recording_seconds += perf_counter() - started
        return recorded

    def _drop_least_recent(self) -> None:
        """Drop the graph whose latest use was before that of all others."""
        key, program = min(
            ((key, program) for key, programs in self._programs.items() for program in programs),
            key=lambda pair: pair[1].last_use,
        )
        self._programs[key].remove(program)

    def _record(
        self, program_key: tuple[Hashable, ...], numbers: Numbers, call: Call, leaves: Leaves
    ) -> Program | LossEvaluation | None:
        """Record a program.

        If it cannot be recorded, return the evaluation of its usual run, or None if the program must run again.
        """
        key_and_kinds = program_key, kinds(leaves.values)
        with one_at_a_time(), suspend_garbage_collection():
            evaluation, program = record_program(call, leaves, numbers)
        if isinstance(program, Refused):
            if program.may_try_again and key_and_kinds not in self._failed_once:
                self._failed_once.add(key_and_kinds)
            else:
                self._unrecordable.add(key_and_kinds)
                self._warn_eager(program.reason)
            return evaluation
        if self._device is None:
            self._device = device_graphs(program.device)
        program = replace(program, cuda_graphs=self._device if self.compile else None)
        try:
            replayed = program.rehearse(call, leaves)
        except RuntimeError as error:
            self._warn_eager(f"torch can record it, but not replay it: {error}".splitlines()[0])
            self._unrecordable.add(key_and_kinds)
            return None
        if numbers and _largest_difference(replayed, evaluation) is not None:
            # The program may test the type of a number, and compute something else for a tensor.
            numbers.exclude_all()
            return self._record(program_key, numbers, call, leaves)
        # Numbers that Python has read during the recording are now part of the signature.
        key = program_key, descriptions(leaves.values, numbers.positions)
        self._programs.setdefault(key, []).insert(0, program)
        return program

    def _is_wrong(self, program: Program, key: Signature, call: Call, leaves: Leaves) -> bool:
        """Compare a graph with its program, and drop all graphs of the program if its result is different.

        After a second wrong graph the program is not recorded again. Nothing else changes, so it does not matter for
        the results when this is done.
        """
        started = perf_counter()
        replayed = program.rehearse(call, leaves)
        # A loss that is not finite raises its own error, so nothing is compared.
        if bool(replayed.nonfinite):
            return False
        with rehearsal():
            evaluation = _run_as_it_is(call._replace(attached=False))
        difference = _largest_difference(replayed, evaluation)
        now = perf_counter()
        program.next_check = now + len(self.programs) * (now - started) / CHECKED_SHARE
        if difference is None:
            return False
        # All of the same model, guide and loss, with other arguments too.
        self._drop_graphs(lambda program_key: program_key[0] == key[0][0])
        if key in self._dropped:
            self._unrecordable.add((key[0], kinds(leaves.values)))
            self._warn_eager(f"its graph gives something else than the program, at {difference}")
        else:
            warn(
                f"a graph gave something else than its program, at {difference}, because of a change that could not be "
                "seen; it is recorded again. Pass what changes as an argument, or keep it in a buffer"
            )
        self._dropped.add(key)
        return True

    def _reason_for_limit(self, programs: Sequence[Program], leaves: Leaves) -> str:
        """Return the reason why the limit of ``max_signatures`` graphs is reached: what keeps changing."""
        if not programs and not leaves.values:
            return (
                f"there are max_signatures = {self.max_signatures} graphs of other models, guides, losses, settings or "
                "states; raise max_signatures"
            )
        if not programs:
            return (
                f"its arguments are of more than max_signatures = {self.max_signatures} kinds (shapes, strides, "
                "dtypes, devices, and values that are not tensors); use batches of one shape, pass changing numbers as "
                "tensors, or raise max_signatures"
            )
        state = programs[0].state
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


def _check_surroundings(call: Call) -> None:
    """Raise an error if no program can have a graph here: in other handlers, in a search for NaN, by this loss."""
    if handlers := handlers_around():
        raise Refused(
            f"it runs inside of {handlers[-1]}, a handler of Pyro; leave it, or use CompiledSVI instead of SVI"
        )
    if torch.is_anomaly_enabled():
        raise Refused("torch.autograd.detect_anomaly is on, and it follows no graph")
    reason = why_not_differentiable(call.loss)
    if reason is not None:
        raise Refused(reason)


def _run_as_it_is(call: Call) -> LossEvaluation:
    """Evaluate the loss without a graph."""
    with one_at_a_time():
        return evaluate_loss(call._replace(optimizer=None))


def _largest_difference(replayed: LossEvaluation, evaluation: LossEvaluation) -> str | None:
    """Return the site or gradient with the largest difference between graph and program, or None if they agree."""
    program_gradients = dict(zip(evaluation.parameters, evaluation.gradients, strict=True))
    # The values to compare, by a label for messages.
    replayed_values = {"the loss": replayed.loss}
    program_values = {"the loss": evaluation.loss}
    for (name, parameter), gradient in zip(
        replayed.parameters.items(), replayed.gradients, strict=True
    ):
        program_gradient = program_gradients.get(name)
        label = f"the gradient of {name}"
        replayed_values[label] = torch.zeros_like(parameter) if gradient is None else gradient
        program_values[label] = (
            torch.zeros_like(parameter) if program_gradient is None else program_gradient
        )
    values = list(replayed_values.values()), list(program_values.values())
    if relative_difference(*values) <= MOST_DIFFERENCE:
        return None
    replayed_terms = terms_by_site(replayed)
    for name, program_term in terms_by_site(evaluation).items():
        # The name of a site tells more than that of the loss or a gradient.
        term = replayed_terms.get(name)
        if term is not None and relative_difference([term], [program_term]) > MOST_DIFFERENCE:
            return f"site '{name}'"
    return max(
        replayed_values,
        key=lambda label: relative_difference([replayed_values[label]], [program_values[label]]),
    )
