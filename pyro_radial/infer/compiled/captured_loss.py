# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss and its gradients from graphs that are recorded once and replayed."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_radial._pyro.compat import handlers_around, tree_flatten
from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial.infer.compiled.compilation import compiled, is_compiled
from pyro_radial.infer.compiled.graph import UncapturableError, described
from pyro_radial.infer.compiled.program import Call, Evaluation, evaluate, guide_sites
from pyro_radial.infer.compiled.recording import Recording, record_program
from pyro_radial.infer.elbo import RadialELBO

__all__ = ["CapturedLoss"]

LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

NOTHING: Mapping[str, Tensor] = {}

# A graph is compiled once it has been used so often: an odd last batch comes once an epoch.
USES_BEFORE_COMPILING = 3


class CapturedLoss:
    """A loss of a model and a guide, and its gradients.

    For each signature of the arguments (their tree, shapes, strides, dtypes and devices, and what is no tensor by its
    value) the program runs once as it is, so that what is wrong raises the error that it always does, is recorded, and
    is replayed from then on. A program that is no graph runs as it is each time; a warning says so once, and why.

    :param model: a Pyro model.
    :param guide: its guide.
    :param ELBO loss: a loss with ``differentiable_loss``.
    :param bool compile: whether graphs that are used more than a few times are compiled, or replayed as recorded.
    :param int max_signatures: the most signatures to record.
    :param options: settings of inductor.
    :param str who: what errors and warnings call it.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        loss: ELBO,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        options: Mapping[str, Any] | None = None,
        who: str = "CompiledSVI",
    ) -> None:
        self.model, self.guide, self.loss = model, guide, loss
        self.compile, self.max_signatures, self.options, self.who = compile, max_signatures, dict(options or {}), who
        self._recordings: dict[Any, Recording] = {}
        # The signatures of programs that are no graphs, of which to find out takes long.
        self._refused: set[Any] = set()
        self._weights: dict[torch.device, Tensor] = {}
        #: What the latest loss trains, unconstrained, by its name in Pyro's store.
        self.parameters: dict[str, Tensor] = {}
        #: Why programs run as they are, in words; empty while all are graphs.
        self.eager_because: list[str] = []

    def __call__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        gradients: bool = True,
        also: Mapping[str, Tensor] = NOTHING,
        compile_after: int | None = USES_BEFORE_COMPILING,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss, and each parameter that it depends on with its gradient.

        The terms and the step of a ``RadialELBO`` are what they are after an evaluation of its own.

        :param bool gradients: whether to compute them; without, the loss alone.
        :param also: parameters by name that are trained besides those of ``param`` statements, if the loss depends on
            them.
        :param int compile_after: the uses of a graph as it was recorded before it is compiled, unless code for one like
            it is there; None for all of them.
        :raises ValueError: for a signature too many, and whatever the model, the guide and the loss raise.
        """
        call = Call(self.loss, self.model, self.guide, args, kwargs, gradients, also)
        weight = self._weight()
        leaves, tree = tree_flatten((args, dict(kwargs)))
        if self._runs_as_it_is(leaves):
            return self._eagerly(call)
        # By its text, since the trees of older versions of torch have no hash.
        key = (repr(tree), tuple(map(_signature, leaves)), gradients, weight != 0.0, _autocast())
        recording = self._recordings.get(key)
        if recording is None or not recording.holds():
            recording = None if key in self._refused else self._record(key, call, weight)
            if recording is None:
                return self._eagerly(call)
        self.parameters = recording.parameters()
        inputs = [self._weight_on(recording.device, weight), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        with torch.no_grad():
            tensors = self._code(recording, inputs, compile_after)(*recording.constants(), *inputs)
        evaluation = Evaluation.of(tensors, recording.layout)
        self._keep_terms(evaluation, weight, partial(guide_sites, self.guide, args, kwargs), gradients)
        return evaluation.loss, recording.with_gradients(evaluation)

    @property
    def recordings(self) -> list[Recording]:
        """The graphs, in the order of their first use."""
        return list(self._recordings.values())

    def _runs_as_it_is(self, leaves: Sequence[Any]) -> bool:
        if handlers_around():
            return True
        unknown = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *LEAVES))), None)
        if unknown is not None:
            self._say(
                "its arguments must be tensors, numbers, strings, None, and tuples, lists and dicts of these, got "
                f"{type(unknown).__name__}"
            )
        return unknown is not None

    def _eagerly(self, call: Call) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        with one_at_a_time():
            evaluation, self.parameters = evaluate(call)
        used = [p for p, used in zip(self.parameters.values(), evaluation.layout.used, strict=True) if used]
        return evaluation.loss, list(zip(used, evaluation.gradients, strict=True)) if call.gradients else []

    def _record(self, key: Any, call: Call, weight: float) -> Recording | None:
        """A new recording for a signature, or None where there can be none."""
        if key not in self._recordings and len(self._recordings) >= self.max_signatures:
            raise ValueError(
                f"{self.who}: arguments must be of at most max_signatures = {self.max_signatures} kinds (shapes, "
                "strides, dtypes, devices, and numbers that are no tensors), got another: bring batches to one shape, "
                "make numbers that change tensors, or let max_signatures be more"
            )
        with one_at_a_time():
            try:
                recording = record_program(call, weight)
            except UncapturableError as reason:
                self._say(str(reason))
                self._refused.add(key)
                return None
        self._recordings[key] = recording
        return recording

    def _say(self, reason: str) -> None:
        if reason not in self.eager_because:
            self.eager_because.append(reason)
            warnings.warn(f"{self.who}: the program runs as it is, without a graph: {reason}", stacklevel=4)

    def _code(
        self, recording: Recording, inputs: list[Tensor], compile_after: int | None
    ) -> Callable[..., Sequence[Tensor]]:
        """What replays a recording: compiled code, if there is any or it is time to make it."""
        if recording.code is None and self.compile and compile_after is not None:
            recording.uses += 1
            if recording.uses > compile_after or is_compiled(recording.graph, inputs, self.options):
                with one_at_a_time():
                    recording.code = compiled(recording.graph, inputs, self.options)
        return recording.graph.module if recording.code is None else recording.code

    def _weight(self) -> float:
        return self.loss.weight_now() if isinstance(self.loss, RadialELBO) else 1.0

    def _weight_on(self, device: torch.device, weight: float) -> Tensor:
        if device not in self._weights:
            self._weights[device] = torch.ones((), device=device)
        return self._weights[device].fill_(weight)

    def _keep_terms(self, evaluation: Evaluation, weight: float, sites: Callable[[], Any], gradients: bool) -> None:
        if isinstance(self.loss, RadialELBO):
            self.loss.keep(evaluation.loss_terms(weight, sites), gradients)


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return described(leaf)
    return type(leaf), leaf
