# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss and its gradients from graphs that are recorded once, compiled, and replayed."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_radial._pyro.compat import CompilerMissingError, compile_graph, handlers_around, tree_flatten
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.compiled.graph import ChangedTensors, Graph, put_back
from pyro_radial.infer.compiled.recording import (
    JITTED,
    Call,
    Evaluation,
    Recording,
    Refusal,
    Update,
    evaluate,
    guide_entropies,
    is_differentiable,
    record_program,
)
from pyro_radial.infer.compiled.state import PLAIN, described
from pyro_radial.infer.elbo import LossTerms, TermsELBO

__all__ = ["CapturedLoss", "compiled", "forget"]

NOTHING: Mapping[str, Tensor] = {}

# A graph is compiled after this many uses. Compiling takes seconds, and saves milliseconds at each use.
USES_BEFORE_COMPILING = 1000

# Torch's own random numbers: inductor's are several times slower on a CPU, and differ from those of an eager step.
# Instructions that torch itself uses need no trial by a compiler, which takes seconds.
OPTIONS = {"fallback_random": True, "cpp.vec_isa_ok": torch.backends.cpu.get_cpu_capability().startswith("AVX") or None}
MOST_KEPT = 64

# Between compiled code and its graph: the largest error, relative to a result's norm or to this share of the largest.
MOST_ROUNDING, SMALL = 0.01, 1e-3

# Settings of Pyro that a graph fixes.
SETTINGS = ("module_local_params", "radial_kl_directions", "radial_kl_seed", "validate_distributions_pyro")

Code = Callable[..., Sequence[Tensor]]

_kept: dict[Any, Code] = {}


class CapturedLoss:
    """A loss of a model and a guide, and its gradients.

    For each signature of the arguments the program runs once as usual, so that it raises its usual errors, is recorded,
    and is replayed from then on. A program that cannot be captured runs as usual each time, after one warning.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        loss: Any,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.guide, self.loss = model, guide, loss
        self.compile, self.max_signatures, self.options = compile, max_signatures, dict(options or {})
        # By signature, the latest in use first, and the programs that cannot be captured, which takes long to find out.
        # Both keep their programs alive, whose ids the signatures hold.
        self._recordings: dict[Any, list[Recording]] = {}
        self._refused: dict[Any, Any] = {}
        #: The uses of a graph before it is compiled; None replays graphs as recorded.
        self.compile_after: int | None = USES_BEFORE_COMPILING
        #: The parameters of the latest loss, unconstrained, by name in Pyro's store.
        self.parameters: dict[str, Tensor] = {}
        #: Whether the latest loss came from a graph.
        self.replayed = False
        #: Why programs run without a graph; empty if all have one.
        self.eager_because: list[str] = []

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        gradients: bool = True,
        also: Mapping[str, Tensor] = NOTHING,
        update: Update | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss, and each parameter that it depends on with its gradient, also those in ``also`` by name.

        A graph takes the step ``update`` itself. Its parameters are then left out, and keep their values if the loss is
        not finite.
        """
        weight = self.loss.weight_now() if isinstance(self.loss, TermsELBO) else 1.0
        call = Call(self.loss, self.model, self.guide, args, kwargs, gradients, also, update, weight)
        leaves, tree = tree_flatten((args, dict(kwargs)))
        self.replayed = False
        if self._runs_as_it_is(leaves):
            return self._eagerly(call)
        key = self._signature(leaves, tree, gradients, update is None, weight != 0.0)
        recording = self._recording(key, call)
        if not isinstance(recording, Recording):
            return self._eagerly(call, recording)
        self.replayed = True
        self.parameters = recording.parameters()
        weight_tensor = torch.full((), weight, device=recording.device)
        inputs = [weight_tensor, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        with torch.no_grad():
            tensors = self._code(recording, inputs)(*recording.constant_tensors(), *inputs)
        evaluation: Evaluation = recording.graph.result(tensors)._replace(parameters=self.parameters)
        if isinstance(self.loss, TermsELBO):
            entropies = partial(guide_entropies, self.guide, args, kwargs)
            self.loss.keep(LossTerms(weight, entropies=entropies, **evaluation.terms), gradients)
        return evaluation.loss, evaluation.with_gradients(hooks=True)

    @property
    def recordings(self) -> list[Recording]:
        """The recordings, by signature."""
        return [recording for recordings in self._recordings.values() for recording in recordings]

    def _runs_as_it_is(self, leaves: Sequence[Any]) -> bool:
        if handlers_around():
            return True
        if not is_differentiable(self.loss):
            name = type(self.loss).__name__
            own = f"compiles it itself, more slowly; use {name.removeprefix('Jit')}"
            self._say(f"{name} {own if isinstance(self.loss, JITTED) else 'has no differentiable_loss'}")
            return True
        unknown = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))), None)
        if unknown is not None:
            self._say(
                "its arguments must be tensors, numbers, strings, None, and tuples, lists and dicts of these, got "
                f"{type(unknown).__name__}"
            )
        return unknown is not None

    def _eagerly(self, call: Call, ran: Refusal | None = None) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run the program as usual, if it has not."""
        with one_at_a_time():
            evaluation = evaluate(call._replace(update=None)) if ran is None else ran.evaluation
        self.parameters = evaluation.parameters
        # A loss that adds its gradients itself has called hooks.
        return evaluation.loss, evaluation.with_gradients(hooks=is_differentiable(call.loss))

    def _signature(self, leaves: Sequence[Any], tree: Any, *rest: Any) -> Any:
        """What decides on a graph, besides the state that the program reads."""
        ids = tuple(map(id, (self.model, self.guide, self.loss)))
        # Trees have no hash in older versions of torch.
        signatures = tuple(described(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        return ids, repr(tree), signatures, rest, settings_now()

    def _recording(self, key: Any, call: Call) -> Recording | Refusal | None:
        """A recording that holds, perhaps a new one; what the first run of a program without one gave, later None."""
        if key in self._refused:
            return None
        recordings = self._recordings.setdefault(key, [])
        for place, recording in enumerate(recordings):
            if recording.holds():
                if place:
                    recordings.insert(0, recordings.pop(place))
                return recording
        if len(self.recordings) >= self.max_signatures:
            self._say(self._too_many(recordings))
            return None
        with one_at_a_time():
            made = record_program(call)
        if isinstance(made, Refusal):
            self._say(made.reason)
            self._refused[key] = call.model, call.guide, call.loss
        else:
            recordings.insert(0, made)
        return made

    def _too_many(self, recordings: Sequence[Recording]) -> str:
        """The reason for no other graph."""
        if not recordings:
            return (
                f"its arguments are of more than max_signatures = {self.max_signatures} kinds (shapes, strides, "
                "dtypes, devices, and values that are not tensors); use batches of one shape, pass changing numbers as "
                "tensors, or raise max_signatures"
            )
        state = recordings[0].state
        path, _ = state.changes()[0]
        return (
            f"{path} keeps changing{state.code.line_of(path)}, and there are max_signatures = {self.max_signatures} "
            "graphs; pass it as a tensor, keep it in a buffer, or raise max_signatures"
        )

    def _say(self, reason: str) -> None:
        if reason not in self.eager_because:
            self.eager_because.append(reason)
            warnings.warn(f"the program runs uncompiled: {reason}", stacklevel=6)

    def _code(self, recording: Recording, inputs: list[Tensor]) -> Code:
        """The compiled code of a recording, made when it is time, or the graph itself."""
        if recording.code is None and self.compile and self.compile_after is not None:
            recording.uses += 1
            if recording.uses > self.compile_after or _key(recording.graph, inputs, self.options) in _kept:
                recording.code = compiled(recording.graph, inputs, self.options)
        return recording.graph.module if recording.code is None else recording.code


@one_at_a_time()
def compiled(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Code:
    """Compiled code for a graph, perhaps made for an equal one; without a compiler, the graph itself."""
    key = _key(graph, inputs, options)
    if key not in _kept:
        try:
            _kept[key] = _checked_code(graph, inputs, {**OPTIONS, **options})
        except CompilerMissingError as error:
            warnings.warn(f"no compiler on this machine, so graphs run as recorded: {error}", stacklevel=2)
            _kept[key] = graph.module
        if len(_kept) > MOST_KEPT:
            del _kept[next(iter(_kept))]
    return _kept[key]


@torch.no_grad()
def _checked_code(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Code:
    """Code with the results of the graph on the same noise; inductor's can be wrong. Its own noise differs."""
    tensors = [tensor.detach() for tensor in (*graph.constants, *inputs)]
    if not options["fallback_random"]:
        return compile_graph(graph.module, tensors, options)
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    changed = ChangedTensors()

    def results(code: Code, watched: Any) -> list[Tensor]:
        """What code returns, and what it makes of the tensors that the graph changes."""
        with torch.random.fork_rng(devices), watched:
            found = [tensor.clone() for tensor in (*code(*tensors), *(tensor for tensor, _ in changed.before))]
        put_back(changed.before)
        return found

    expected = results(graph.module, changed)
    # Without vector instructions code was right wherever it had been wrong.
    for own in (options, {**options, "cpp.simdlen": 1}):
        code = compile_graph(graph.module, tensors, own)
        if _agree(results(code, nullcontext()), expected):
            return code
    warnings.warn("inductor's code gives other numbers than the graph, so the graph runs as recorded", stacklevel=2)
    return graph.module


def _agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether results differ by rounding alone; one that is small beside the others may be nothing else."""
    sizes = [float(result.double().norm()) for result in theirs]
    least = SMALL * max((size for size in sizes if math.isfinite(size)), default=0.0)
    for a, b, size in zip(ours, theirs, sizes, strict=True):
        equal = (a == b) | (a.isnan() & b.isnan())
        if not float((a.double() - b.double()).masked_fill(equal, 0.0).norm()) <= MOST_ROUNDING * max(size, least):
            return False
    return True


def settings_now() -> tuple[Any, ...]:
    """The settings of torch and Pyro that a graph fixes."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return *autocast, torch.get_default_dtype(), *(pyro.settings.get(name) for name in SETTINGS)


def forget() -> None:
    """Drop all compiled code."""
    _kept.clear()


def _key(graph: Graph, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    metadata = tuple(described(tensor) for tensor in (*graph.constants, *inputs))
    return graph.module.code, metadata, tuple(sorted((name, repr(value)) for name, value in options.items()))
