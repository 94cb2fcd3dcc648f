# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Pyro program recorded as a graph, and whether it is still that program."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pyro
import torch
from torch import Tensor

from pyro_radial._pyro.compat import host_reads_removed, stored_parameters, tree_flatten, tree_unflatten
from pyro_radial._pyro.random_state import seeded_elsewhere
from pyro_radial.infer.compiled.graph import Graph, UncapturableError, record, user_line
from pyro_radial.infer.compiled.program import Call, Evaluation, Layout, ScaleInputs, evaluate, scales_of
from pyro_radial.infer.compiled.structure import Slot, Structure, slots_of, unchanged
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.training.data import device_of, dtype_of

__all__ = ["Recording", "record_program"]

# What of a loss changes from step to step, and is no part of the graph.
CHANGING = ("step", "kl_weight")

# Files in these are not the user's.
LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(file)))
    for file in (torch.__file__, pyro.__file__, os.path.join(os.path.dirname(__file__), "..", "..", "__init__.py"))
)


@dataclass
class Recording:
    """A graph, and what it needs at each replay.

    :param Graph graph: takes its constants, the weight of the KL and the tensors among the arguments.
    :param Structure structure: the modules when it was recorded.
    :param torch.device device: where it runs.
    :param stored: Pyro's store then.
    :param named: the parameters by name and place.
    :param code: what replays it faster, once there is.
    :param int uses: how often it was used until then.
    """

    graph: Graph
    structure: Structure
    device: torch.device
    stored: Mapping[str, Tensor]
    named: list[tuple[str, Slot]]
    code: Callable[..., Sequence[Tensor]] | None = None
    uses: int = 0

    @property
    def layout(self) -> Layout:
        """What its outputs are."""
        layout: Layout = self.graph.static
        return layout

    def parameters(self) -> dict[str, Tensor]:
        """What is trained, as it is now."""
        return {name: slot.tensor for name, slot in self.named}

    def constants(self) -> list[Tensor]:
        """The tensors that are no arguments, as they are now."""
        return self.graph.constant_tensors()

    def holds(self) -> bool:
        """Whether the program, and the shapes of its tensors, are still those recorded."""
        stored = stored_parameters()
        if stored is not self.stored or not self.structure.holds() or not self.graph.fits():
            return False
        # What Pyro's store holds is what it trains, which after a load of the store is another tensor.
        return all(stored.get(name, slot.tensor) is slot.tensor for name, slot in self.named)

    def with_gradients(self, evaluation: Evaluation) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that the loss depends on, with its gradient."""
        used = [slot.tensor for (_, slot), used in zip(self.named, self.layout.used, strict=True) if used]
        return list(zip(used, evaluation.gradients, strict=True))


def record_program(call: Call, weight: float) -> Recording:
    """Run a program once as it is, and record it twice.

    Modules, generators of random numbers and the loss are afterwards as they were before.

    :param float weight: the weight of the KL now; zero is a graph of its own.
    :raises UncapturableError: if it is no graph, or not the same one in each run.
    """
    loss, model, guide = call.loss, call.model, call.guide
    roots = (model, guide, *vars(loss).values())
    step = getattr(loss, "step", None)
    try:
        with unchanged(*roots, attributes=False):
            scales = scales_of(call)
        recordings = []
        for seed in (0, 1):
            with unchanged(*roots), seeded_elsewhere(seed), _garbage_kept():
                recordings.append(_recorded(call, weight, scales))
    finally:
        if step is not None:
            loss.step = step
    (graph, found), (again, _) = recordings
    _check_alike(graph, again)
    with _garbage_kept():
        places = {id(slot.tensor): slot for slot in reversed(slots_of(*roots))}
    named = [(name, places[id(value)]) for name, value in found.items()]
    structure = Structure((model, guide), (loss,), CHANGING)
    return Recording(graph, structure, device_of(guide, model), stored_parameters(), named)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No automatic collection: it would take the parameters of other guides out of Pyro's store as that is read."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _recorded(call: Call, weight: float, scales: Sequence[float]) -> tuple[Graph, dict[str, Tensor]]:
    loss, model, guide = call.loss, call.model, call.guide
    leaves, tree = tree_flatten((call.args, dict(call.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    slots = slots_of(model, guide, *vars(loss).values())
    device = device_of(guide, model)
    # Without dims, so that it changes no dtype but that of another number.
    scale_tensors = {scale: torch.tensor(scale, dtype=dtype_of(guide, model), device=device) for scale in scales}
    trained: dict[str, Tensor] = {}

    def run(kl_weight: Tensor, *tensors: Tensor) -> tuple[list[Tensor], Layout]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        own_args, own_kwargs = tree_unflatten(values, tree)
        weighted = loss.weighted_by(kl_weight if weight else 0.0) if isinstance(loss, RadialELBO) else nullcontext()
        before = [(slot, slot.tensor) for slot in slots]
        with ScaleInputs(scale_tensors), weighted:
            evaluation, found = evaluate(call._replace(args=own_args, kwargs=own_kwargs))
        trained.update(found)
        _write_into(before)
        return evaluation.tensors, evaluation.layout

    inputs = [torch.ones((), device=device), *(leaves[place].detach() for place in places)]
    live = {id(tensor) for tensor in (*inputs, *(slot.tensor for slot in slots))}
    try:
        with host_reads_removed(type(loss)):
            return record(run, inputs, slots, live), trained
    except UncapturableError:
        raise
    except Exception as error:
        raise UncapturableError(_why(error)) from error


def _write_into(before: Sequence[tuple[Slot, Tensor]]) -> None:
    """Let a buffer that was replaced by another be written into instead, which a graph can do."""
    for slot, tensor in before:
        now = slot.tensor
        if now is not tensor:
            with torch.no_grad():
                tensor.copy_(now)
            slot.holder[slot.key] = tensor


def _check_alike(first: Graph, second: Graph) -> None:
    """Refuse a program that is another each time, since a graph would be one of them for good."""
    for what in ("nll_sites", "kl_sites"):
        sites = getattr(first.static, what), getattr(second.static, what)
        if sites[0] != sites[1]:
            raise UncapturableError(f"its sites differ between two runs: {list(sites[0])} and {list(sites[1])}")
    if first.module.code != second.module.code or not first.holds_as_much_as(second):
        raise UncapturableError(
            "two runs of it with the same noise of torch are two different graphs, so it draws random numbers of "
            "Python or NumPy, or depends on something else that changes"
        )


def _why(error: Exception) -> str:
    """What was in the way, and where in the user's own code."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    line = user_line(error, LIBRARIES)
    where = "" if line is None else f" ({line})"
    if "tracing tensor" in str(cause) or "data-dependent" in str(cause):
        return f"Python reads the value of a tensor that the model or the guide computes{where}"
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}{where}"
