# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss of a Pyro program, with its terms and gradients, recorded as a graph."""

import gc
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_radial._pyro.compat import host_reads_removed, stored_parameters, tree_flatten, tree_unflatten
from pyro_radial._pyro.random_numbers import TorchNoise, seeded_elsewhere
from pyro_radial.infer.compiled.graph import ChangedTensors, Graph, ReplacedBuffers, put_back, record, restored
from pyro_radial.infer.compiled.state import Code, State, UncapturableError, described
from pyro_radial.infer.elbo import LossTerms, RadialELBO, entropies
from pyro_radial.infer.training.data import device_of, dtype_of

__all__ = [
    "Call",
    "Evaluation",
    "Layout",
    "Recording",
    "Refusal",
    "Update",
    "evaluate",
    "guide_entropies",
    "is_differentiable",
    "record_program",
]


class Update(NamedTuple):
    """The step of an optimizer inside a graph, and the tensors that it changes.

    ``move`` takes the loss, and gradients and constrained values by the ids of parameters. It returns the ids of the
    parameters that it has moved. ``check`` raises an error if the loss's terms are wrong.
    """

    move: Callable[[Tensor, Mapping[int, Tensor | None], Mapping[int, Tensor]], set[int]]
    changed: Sequence[Tensor]
    check: Callable[[], None] | None = None


class Call(NamedTuple):
    """The arguments of one evaluation: ``also`` are trained parameters besides those of ``param`` statements."""

    loss: Any
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: bool
    also: Mapping[str, Tensor]
    update: Update | None = None


@dataclass(frozen=True)
class Layout:
    """The names that go with the tensors of an evaluation, in order, and the plain values of its terms.

    ``sites`` names the NLLs, KLs and weight-space KLs; ``used`` says for each parameter whether the loss depends on it.
    """

    used: tuple[bool, ...]
    sites: tuple[tuple[str, ...], ...] = ()
    num_data: int | None = None
    sampled_kl: dict[str, str] = field(default_factory=dict)
    weight_space_kl_weight: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """A detached loss, the terms of the layout's sites (if it keeps any), and the gradients of used parameters."""

    loss: Tensor
    terms: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    layout: Layout

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors in one list."""
        return [self.loss, *self.terms, *self.gradients]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: Layout) -> "Evaluation":
        """The inverse of :attr:`tensors`."""
        num_terms = sum(map(len, layout.sites))
        return cls(tensors[0], tuple(tensors[1 : 1 + num_terms]), tuple(tensors[1 + num_terms :]), layout)

    def loss_terms(self, kl_weight: float, entropies: Callable[[], dict[str, Tensor]]) -> LossTerms:
        """The terms as the loss keeps them."""
        layout, terms = self.layout, iter(self.terms)
        nll, kl, of_weights = ({name: next(terms) for name in names} for names in layout.sites)
        return LossTerms(
            kl_weight,
            nll,
            kl,
            entropies,
            layout.num_data,
            layout.sampled_kl,
            layout.weight_space_kl_weight,
            of_weights,
        )

    def with_gradients(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each parameter that the loss depends on, with its gradient."""
        used = [parameter for parameter, used in zip(parameters, self.layout.used, strict=True) if used]
        return list(zip(used, self.gradients, strict=True))


class ScaleInputs(Messenger):
    """The outermost handler, which replaces the scales of sites, such as N / B, by 0-d tensors, inputs of the graph."""

    def __init__(self, tensors: Mapping[float, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.seen: list[float] = []

    def _pyro_sample(self, msg: Any) -> None:
        scale = msg["scale"]
        if isinstance(scale, int | float) and scale not in (0, 1):
            self.seen.append(scale)
            msg["scale"] = self.tensors.get(scale, scale)


def evaluate(call: Call) -> tuple[Evaluation, dict[str, Tensor]]:
    """Run the program, and return its evaluation and its unconstrained parameters by name, found as ``SVI`` does."""
    loss, model, guide, args, kwargs, gradients, also, update = call
    if is_differentiable(loss):
        function = getattr(loss, "differentiable_loss", loss)
    else:
        function = loss.loss_and_grads if gradients else loss.loss
    # Losses of Pyro that enumerate refuse to do without gradients.
    with_graph = gradients or not isinstance(loss, RadialELBO)
    with poutine.trace(param_only=True) as capture, torch.set_grad_enabled(with_graph):
        value = torch.as_tensor(function(model, guide, *args, **kwargs))
    parameters = _trained(capture.trace)
    if not is_differentiable(loss):
        return _evaluated(value, parameters)
    known = {id(parameter) for parameter in parameters.values()}
    parameters |= {name: p for name, p in also.items() if p.requires_grad and id(p) not in known}
    found: Sequence[Tensor | None] = ()
    if gradients and parameters and value.requires_grad:
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    if update is not None:
        by_id = dict(zip(map(id, parameters.values()), found, strict=False))
        moved = update.move(value.detach(), by_id, _constrained(capture.trace))
        found = [None if key in moved else gradient for key, gradient in by_id.items()]
    used = tuple(gradient is not None for gradient in found) or (False,) * len(parameters)
    terms: tuple[Tensor, ...] = ()
    layout = Layout(used)
    if isinstance(loss, RadialELBO):
        named = loss.terms
        by_site = (named.nll_by_site, named.kl_by_site, named.weight_space_kl_by_site)
        terms = tuple(term for values in by_site for term in values.values())
        sites = tuple(map(tuple, by_site))
        layout = Layout(used, sites, named.num_data, named.sampled_kl, named.weight_space_kl_weight)
    return Evaluation(value.detach(), terms, _apart(g for g in found if g is not None), layout), parameters


def is_differentiable(loss: Any) -> bool:
    """Whether a loss, or a function in its place, returns a tensor to differentiate."""
    return hasattr(loss, "differentiable_loss") or not hasattr(loss, "loss_and_grads")


def _evaluated(value: Tensor, parameters: dict[str, Tensor]) -> tuple[Evaluation, dict[str, Tensor]]:
    """The evaluation of a loss that has added its gradients to those of the parameters."""
    found = [parameter.grad for parameter in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    layout = Layout(tuple(gradient is not None for gradient in found))
    return Evaluation(value.detach(), (), tuple(g for g in found if g is not None), layout), parameters


def _apart(gradients: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Gradients in memory of their own, so that each can be changed in place."""
    taken: set[int] = set()
    own = []
    for gradient in gradients:
        storage = gradient.untyped_storage()
        alone = gradient.is_contiguous() and len(storage) == gradient.nbytes and storage.data_ptr() not in taken
        own.append(gradient if alone else gradient.clone(memory_format=torch.contiguous_format))
        taken.add(own[-1].untyped_storage().data_ptr())
    return tuple(own)


def guide_entropies(guide: Any, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The entropies of a guide's sites at its current parameters."""
    with torch.no_grad(), torch.random.fork_rng([]), poutine.block():
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
    return entropies(dict(trace.iter_stochastic_nodes()))


def _trained(trace: Trace) -> dict[str, Tensor]:
    """The parameters in a trace, as Pyro's optimizers see them."""
    values = {name: site["value"] for name, site in dict[str, Any](trace.nodes).items()}
    own = {n: value.unconstrained() if hasattr(value, "unconstrained") else value for n, value in values.items()}
    return {name: value for name, value in own.items() if value.requires_grad}


def _constrained(trace: Trace) -> dict[int, Tensor]:
    """The values of constrained parameters, by the id of the unconstrained one."""
    values = [site["value"] for site in dict[str, Any](trace.nodes).values()]
    return {id(value.unconstrained()): value.detach() for value in values if hasattr(value, "unconstrained")}


# The weight of the KL is an input of the graph.
UNREAD = ("loss.step", "loss.kl_weight")

# Files in these are not the user's.
LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(file)))
    for file in (torch.__file__, pyro.__file__, os.path.join(os.path.dirname(__file__), "..", "..", "__init__.py"))
)


@dataclass
class Recording:
    """A recorded program, with the state that it read, and the numbers of its parameters in the state's tensors.

    The graph is one of its constants, the weight of the KL and the tensors among the arguments.
    """

    graph: Graph
    state: State
    device: torch.device
    stored: Mapping[str, Tensor]
    named: dict[str, int]
    constants: list[int | Tensor]
    code: Callable[..., Sequence[Tensor]] | None = None
    uses: int = 0

    def parameters(self) -> dict[str, Tensor]:
        """The current parameters by name."""
        tensors = self.state.tensors
        return {name: tensors[number] for name, number in self.named.items()}

    def constant_tensors(self) -> list[Tensor]:
        """The current constants of the graph."""
        tensors = self.state.tensors
        return [tensors[constant] if isinstance(constant, int) else constant for constant in self.constants]

    def holds(self) -> bool:
        """Whether the program and the shapes of its tensors are unchanged."""
        return stored_parameters() is self.stored and self.state.holds()


class Refusal(NamedTuple):
    """Why a program has no graph, and what its run as usual gave."""

    reason: str
    evaluation: Evaluation
    parameters: dict[str, Tensor]


def record_program(call: Call, weight: float) -> Recording | Refusal:
    """Run a program as usual, and record it twice; a refusal leaves all as after the first run, a recording as before.

    :param float weight: the current weight of the KL; zero has a graph of its own.
    """
    step, noise = getattr(call.loss, "step", None), TorchNoise.now()
    tensors, buffers, code, scales = ChangedTensors(), ReplacedBuffers(), Code(), ScaleInputs({})
    weighted = call.loss.weighted_by(weight) if isinstance(call.loss, RadialELBO) else nullcontext()
    with _garbage_kept(), buffers, tensors, scales, weighted, code.watched():
        evaluation, parameters = evaluate(call._replace(update=None))
    changed = [tensor for tensor, _ in tensors.before]
    if call.update is not None:
        changed += call.update.changed
        if call.update.check is not None:
            call.update.check()
    try:
        recording = _recording(call, weight, code, scales.seen, parameters, changed)
    except UncapturableError as error:
        return Refusal(str(error), evaluation, parameters)
    buffers.put_back()
    put_back(tensors.before)
    noise.restore()
    if step is not None:
        call.loss.step = step
    # Buffers that the first run replaced are again those from before.
    recording.holds()
    return recording


def _recording(
    call: Call,
    weight: float,
    code: Code,
    scales: Sequence[float],
    parameters: Mapping[str, Tensor],
    changed: Sequence[Tensor],
) -> Recording:
    """Record a program that has run, and leave all as it was."""
    roots = {"model": call.model, "guide": call.guide, "loss": call.loss}
    before = State(roots, code, _holders(call, parameters))
    graphs, ignored, noise = [], set(UNREAD), TorchNoise.now()
    for seed in (0, 1):
        try:
            with seeded_elsewhere(seed), _garbage_kept(), restored(changed):
                graphs.append(_recorded(call, weight, scales))
        finally:
            changes = before.changes(replaced=True)
            before.restore()
            noise.restore()
        for path in (path for path, users in changes if users):
            raise UncapturableError(f"it changes {path} while it runs{code.line_of(path)}, which a graph cannot do")
        ignored |= {path for path, _ in changes}
    (graph, found), (again, _) = graphs
    _check_alike(graph, again)
    state = State(roots, code, _holders(call, found), ignored)
    number = {id(tensor): place for place, tensor in enumerate(state.tensors)}
    constants = [number.get(id(tensor), tensor) for tensor in graph.constants]
    named = {name: number[id(value)] for name, value in found.items()}
    return Recording(graph, state, device_of(call.guide, call.model), stored_parameters(), named, constants)


def _holders(call: Call, names: Iterable[str]) -> list[tuple[Mapping[str, Tensor], str]]:
    """Where parameters are found by name: in the store, which may hold another tensor than a module, or in the call."""
    stored = stored_parameters()
    return [(stored if name in stored else call.also, name) for name in names]


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Suspend garbage collection, which would delete the parameters of other guides while Pyro's store is read."""
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
    device = device_of(guide, model)
    # A 0-d tensor does not change the dtype of results.
    scale_tensors = {scale: torch.tensor(scale, dtype=dtype_of(guide, model), device=device) for scale in scales}

    trained: dict[str, Tensor] = {}

    def run(kl_weight: Tensor, *tensors: Tensor) -> tuple[list[Tensor], Layout]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        own_args, own_kwargs = tree_unflatten(values, tree)
        weighted = loss.weighted_by(kl_weight if weight else 0.0) if isinstance(loss, RadialELBO) else nullcontext()
        with ScaleInputs(scale_tensors), weighted, ReplacedBuffers() as buffers:
            evaluation, found = evaluate(call._replace(args=own_args, kwargs=own_kwargs))
        trained.update(found)
        buffers.put_back(write=True)
        return evaluation.tensors, evaluation.layout

    inputs = [torch.ones((), device=device), *(leaves[place].detach() for place in places)]
    try:
        with host_reads_removed(type(loss)):
            return record(run, inputs), trained
    except UncapturableError:
        raise
    except Exception as error:
        raise UncapturableError(_why(error)) from error


def _check_alike(first: Graph, second: Graph) -> None:
    """Raise an error if two recordings differ."""
    for one, other in zip(first.static.sites, second.static.sites, strict=True):
        if one != other:
            raise UncapturableError(f"its sites differ between two runs: {list(one)} and {list(other)}")
    if first.module.code != second.module.code or not all(
        a is b or (described(a) == described(b) and torch.equal(a, b))
        for a, b in zip(first.constants, second.constants, strict=True)
    ):
        raise UncapturableError(
            "two runs of it with the same torch noise are two different graphs, so it draws random numbers from "
            "Python or NumPy, or depends on something else that changes"
        )


def _why(error: Exception) -> str:
    """The reason, and where in the user's code."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    line = _user_line(error)
    where = "" if line is None else f" ({line})"
    if "tracing tensor" in str(cause) or "data-dependent" in str(cause):
        return f"Python reads the value of a tensor that the model or the guide computes{where}"
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}{where}"


def _user_line(error: BaseException | None) -> str | None:
    """The line outside the libraries' folders where an error or its cause came from."""
    found = None
    while error is not None:
        for frame, number in traceback.walk_tb(error.__traceback__):
            filename = frame.f_code.co_filename
            if not filename.startswith(("<", *LIBRARIES)):
                found = f"{Path(filename).name}, line {number}"
        error = error.__cause__ or error.__context__
    return found
