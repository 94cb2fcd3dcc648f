# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss of a Pyro program, with its terms and gradients, recorded as a graph."""

import gc
import math
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.infer import TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions.constraints import integer_interval, real

from pyro_radial._pyro.compat import (
    ReplaceFunctions,
    remove_host_reads,
    stored_parameters,
)
from pyro_radial._pyro.random_numbers import TorchNoise, seeded_elsewhere
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.elbo import LossTerms, TermsELBO, entropies
from pyro_radial.infer.step.arguments import (
    Leaves,
    Numbers,
    as_tensor_of,
    is_number,
    rebuilder,
)
from pyro_radial.infer.step.evaluate import Call, Evaluation, evaluate
from pyro_radial.infer.step.graph import (
    ChangedTensors,
    Graph,
    put_back,
    put_buffers_back,
    record,
    replaced_buffers,
    restored,
)
from pyro_radial.infer.step.state import (
    Code,
    Place,
    State,
    UncapturableError,
    described,
    is_library,
    line,
)
from pyro_radial.nn.modules import device_of, dtype_of

#: Raises an error if an evaluation is wrong.
Check = Callable[[Evaluation], None]

# Entries of the terms of a loss that are no tensors of the graph.
HOST_TERMS = ("kl_weight", "entropies")


class Inputs(Messenger):
    """The outermost handler: scales such as N / B become 0-d tensors, which are inputs of the graph.

    A graph has no checks of Pyro's. It makes the scale of an observation outside of its support NaN.
    """

    def __init__(self, scales: Mapping[float, Tensor], checked: Collection[str] = ()) -> None:
        super().__init__()
        self.scales, self.checked = scales, checked
        self.seen: list[float] = []
        self.observed: set[str] = set()
        self.densities: dict[str, Any] = {}  # of the guide's Deltas

    def _pyro_sample(self, msg: Any) -> None:
        scale, value = msg["scale"], msg["value"]
        if isinstance(scale, int | float) and scale not in (0, 1):
            self.seen.append(scale)
            msg["scale"] = self.scales.get(scale, scale)
        if isinstance(leaf(msg["fn"]), Delta) and not (msg["done"] or msg["is_observed"]):
            self.densities[msg["name"]] = leaf(msg["fn"]).log_density
        support = checked_support(msg)
        if support is not None and msg["name"] in self.checked:
            # The remainder in checks of counts takes half as long as their likelihood.
            with ReplaceFunctions({Tensor.remainder: lambda number, _: number - number.floor()}):
                allowed = support.check(value)
            msg["scale"] = torch.where(allowed.all(), msg["scale"], math.nan)
            # The number of a class must not leave a table.
            msg["value"] = (
                torch.where(allowed, value, 0) if isinstance(support, integer_interval) else value
            )
        elif support is not None and getattr(leaf(msg["fn"]), "_validate_args", False):
            self.observed.add(msg["name"])


def checked_support(site: Mapping[str, Any]) -> Any:
    """Return the support of an observed tensor, if a check of it can fail and costs little, else None."""
    if site["is_observed"] and isinstance(site["value"], Tensor):
        with suppress(NotImplementedError):
            support = leaf(site["fn"]).support
            if getattr(support, "base_constraint", support) is not real and support.event_dim < 2:
                return support
    return None


def check_observations(model: Any, guide: Any, args: Any, kwargs: Any) -> None:
    """Raise a ``ValueError`` that names the site of an observation outside of its support, which a graph does not."""
    with pyro.validation_enabled(False), torch.no_grad():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    for name, site in dict[str, Any](trace.nodes).items():
        support = checked_support(site) if site["type"] == "sample" else None
        if support is not None:
            allowed = support.check(site["value"])[(..., *(None,) * support.event_dim)]
            values, allowed = torch.broadcast_tensors(site["value"], allowed)
            for outside in values[~allowed][:1].tolist():
                raise ValueError(
                    f"site {name!r} must have observations within the support {support}, got {outside}"
                )


# The weight of the KL is an input of the graph.
UNREAD = ("loss.step", "loss.kl_weight")


@dataclass
class Recording:
    """A recorded program, with the state that it read, and the numbers of its parameters in the state's tensors.

    The graph is one of its constants, the weight of the KL, other numbers, and the tensors among the arguments.
    """

    graph: Graph
    state: State
    #: The positions of numbers among the leaves of the arguments, and their places in the state with their types.
    positions: Sequence[int]
    places: Sequence[tuple[Place, type]]
    device: torch.device
    dtype: torch.dtype
    stored: Mapping[str, Tensor]
    named: dict[str, int]
    constants: list[int | Tensor]
    #: Where the program keeps the values of parameters, and their names.
    kept: Sequence[tuple[Place, str]] = ()
    # The tensors of the state that the latest two lists are made from; the state replaces its list, not items.
    _made_from: list[Tensor] | None = None
    # The arguments for which the guards held, with their versions.
    _guarded: list[tuple[Tensor, int]] = field(default_factory=list)
    _parameters: dict[str, Tensor] = field(default_factory=dict)
    _constant_tensors: list[Tensor] = field(default_factory=list)

    def parameters(self) -> dict[str, Tensor]:
        """Return the current parameters by name."""
        self._find_tensors()
        return self._parameters

    def constant_tensors(self) -> list[Tensor]:
        """Return the current constants of the graph."""
        self._find_tensors()
        return self._constant_tensors

    def _find_tensors(self) -> None:
        tensors = self.state.tensors
        if tensors is not self._made_from:
            self._made_from = tensors
            self._parameters = {name: tensors[number] for name, number in self.named.items()}
            self._constant_tensors = [
                tensors[place] if isinstance(place, int) else place for place in self.constants
            ]

    def numbers(self, call: Call, leaves: Leaves) -> list[Any]:
        """Return the weight of the KL and the other numbers of a call."""
        given = [leaves.values[position] for position in self.positions]
        return [float(call.weight), *given, *(place.now() for place, _ in self.places)]

    def inputs(self, call: Call, leaves: Leaves) -> list[Tensor]:
        """Return the inputs of the graph, besides its constants."""
        weight, *others = self.numbers(call, leaves)
        numbers = [as_tensor_of(number, self.dtype, self.device) for number in others]
        return [torch.full((), weight, device=self.device), *numbers, *leaves.tensors()]

    def holds(self, leaves: Leaves) -> bool:
        """Whether the program and the shapes of its tensors are unchanged, and what it reads of its arguments."""
        if stored_parameters() is not self.stored or not self.state.holds():
            return False
        same_types = all(type(place.now()) is kind for place, kind in self.places)
        return same_types and self._guards_hold(leaves)

    def _guards_hold(self, leaves: Leaves) -> bool:
        """Return whether what it reads of its arguments is unchanged; the same arguments are not looked at again."""
        if self.graph.guards is None:
            return True
        tensors = leaves.tensors()
        same = [
            t is own and t._version == v
            for t, (own, v) in zip(tensors, self._guarded, strict=False)
        ]
        if self._guarded and all(same):
            return True
        if not self.graph.guards.hold(tensors):
            return False
        self._guarded = [(tensor, tensor._version) for tensor in tensors]
        return True

    def evaluation(self, call: Call, found: Evaluation, way: str) -> Evaluation:
        """What the program would give if its graph has given ``found``; it also leaves what the program leaves."""
        for place, name in self.kept:
            place.put(pyro.get_param_store()[name])
        terms: Any = found.terms
        if terms is not None:
            own_entropies = partial(guide_entropies, call.guide, call.args, call.kwargs)
            terms = LossTerms(call.weight, entropies=own_entropies, **terms)
        gradients = found.gradients
        if call.share != 1.0:
            gradients = tuple(
                None if gradient is None else gradient * call.share for gradient in gradients
            )
        return found._replace(
            parameters=self.parameters(), terms=terms, gradients=gradients, way=way
        )


def guide_entropies(guide: Any, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the entropies of a guide's sites at its current parameters."""
    with torch.no_grad(), torch.random.fork_rng([]), poutine.block():
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
    return entropies(dict(trace.iter_stochastic_nodes()))


class Program(NamedTuple):
    """A program that has run once as usual, and what is known from that run.

    :param first: the scales and observations that it had.
    :param parameters: its parameters by name.
    :param changed: the tensors that it changes.
    """

    call: Call
    leaves: Leaves
    first: Inputs
    parameters: Mapping[str, Tensor]
    changed: Sequence[Tensor]


class UnreadableStateError(UncapturableError):
    """The reason why the state that a program reads cannot be compared."""


class NumbersReadError(Exception):
    """The names of numbers that Python has read while they were inputs."""


class Attempt(NamedTuple):
    """What came of recording a program.

    :param evaluation: what a run as usual gave.
    :param recording: the recording, and all is as before the run; None if there is none, and all is as after it.
    :param reason: why there is none.
    :param again: the code of the run, if a later run, which does less, may be recorded.
    """

    evaluation: Evaluation
    recording: Recording | None = None
    reason: str = ""
    again: Code | None = None


def record_program(
    call: Call,
    leaves: Leaves,
    numbers: Numbers,
    check: Check | None = None,
    after: Code | None = None,
) -> Attempt:
    """Run a program as usual, and record it twice.

    :param numbers: those that are inputs of the graph; it notes the ones that Python reads.
    :param check: a function of the run's result that raises an error if it is wrong.
    :param after: the code of an earlier run that could not be recorded.
    """
    noise, tensors, code, first = TorchNoise.now(), ChangedTensors(), Code(), Inputs({})
    with _garbage_kept(), replaced_buffers() as buffers, tensors, first, code.watched():
        evaluation = evaluate(call._replace(mover=None, attached=False))
    if check is not None:
        check(evaluation)
    if isinstance(call.loss, TraceMeanField_ELBO) and not isinstance(call.loss, TermsELBO):
        sites = [
            name
            for name, density in first.densities.items()
            if bool(torch.as_tensor(density).any())
        ]
        text = f"TraceMeanField_ELBO leaves out the log-Jacobian of {sites}; use TermsELBO or the guide AutoMeanField"
        if sites:
            warnings.warn(text, stacklevel=7)
    changed = [tensor for tensor, _ in tensors.before]
    changed += [
        now for _, before, now in buffers.values() if now is not before and isinstance(now, Tensor)
    ]
    if call.mover is not None:
        changed += call.mover.moved
    own = Program(call, leaves, first, evaluation.parameters, changed)
    try:
        recording = _recording_with(numbers, own, code)
        _check_gradients(recording, evaluation)
    except UncapturableError as error:
        if call.attached:
            noise.restore()
            evaluation = evaluate(call)
        # The first run may do more than later ones, such as find a start by k-means.
        again = code if after is None and isinstance(error, UnreadableStateError) else None
        return Attempt(evaluation, reason=str(error), again=again)
    put_buffers_back(buffers)
    put_back(tensors.before)
    noise.restore()
    # Buffers that the first run replaced are again those from before.
    recording.state.holds()
    return Attempt(evaluation, recording)


def _recording_with(numbers: Numbers, program: Program, code: Code) -> Recording:
    """Record a program with numbers as inputs, except those that Python reads."""
    while numbers:
        try:
            return _recording(program, numbers, code)
        except NumbersReadError as error:
            numbers.give_up(error.args)
        except UncapturableError:
            numbers.give_up_all()
    return _recording(program, numbers, code)


def _state(program: Program, code: Code) -> State:
    """Return the state that a program reads."""
    call = program.call
    roots = {"model": call.model, "guide": call.guide, "loss": call.loss}
    return State(roots, code, _holders(call, program.parameters))


def _recording(program: Program, numbers: Numbers, code: Code) -> Recording:
    """Record a program, and leave all as it was."""
    call, before = program.call, _state(program, code)
    if before.refusal is not None:
        raise UnreadableStateError(before.refusal)
    values = program.leaves.values
    positions = [number for number in sorted(numbers.positions) if is_number(values[number])]
    places = [p for p in before.places if p.path in numbers.paths and is_number(p.now())]
    graphs, ignored, noise = [], set(UNREAD), TorchNoise.now()
    kept: list[tuple[Place, str]] = []
    for seed in (0, 1):
        try:
            with seeded_elsewhere(seed), _garbage_kept(), restored(program.changed):
                # A graph that holds a number itself differs from the graph of another number.
                change = _nearby if seed else lambda number: number
                graphs.append(_recorded(program, before, positions, places, change))
        finally:
            changes = before.changes(replaced=True)
            kept = _kept_parameters(
                before, [constant for graph, _ in graphs for constant in graph.constants]
            )
            before.restore()
            noise.restore()
        harmless = {place.path for place, _ in kept}
        for path in (path for path, users in changes if users and path not in harmless):
            raise UncapturableError(
                f"it changes {path} while it runs{code.line_of(path)}, which a graph cannot do; keep a tensor in a "
                "buffer, or change it between steps"
            )
        ignored |= {path for path, _ in changes}
    (graph, found), (again, _) = graphs
    _check_alike(graph, again)
    ignored |= {place.path for place in places}
    state = State(before.roots, code, _holders(call, found), ignored, graph.read)
    number = {id(tensor): place for place, tensor in enumerate(state.tensors)}
    constants = [number.get(id(tensor), tensor) for tensor in graph.constants]
    named = {name: number[id(value)] for name, value in found.items()}
    device, dtype = _device(call, found.values()), dtype_of(call.guide, call.model)
    typed = [(place, type(place.now())) for place in places]
    return Recording(
        graph,
        state,
        positions,
        typed,
        device,
        dtype,
        stored_parameters(),
        named,
        constants,
        kept,
    )


def _kept_parameters(before: State, read: Sequence[Tensor]) -> list[tuple[Place, str]]:
    """Return the places that a run has set to what a ``param`` statement gave, with the parameters' names.

    :param before: the state from before the run, which had an earlier value of the parameter there.
    :param read: tensors that the run has read; a place with one of them does not count.
    """
    numbers, found = {id(tensor) for tensor in read}, list[tuple[Place, str]]()
    for place, value in zip(before.places, before.values, strict=True):
        now = place.now()
        if now is not value and id(value) not in numbers:
            name = _name_of_parameter(now)
            if name is not None and name == _name_of_parameter(value):
                found.append((place, name))
    return found


def _name_of_parameter(value: Any) -> str | None:
    """Return the name of the parameter that a ``param`` statement gave, or None."""
    parameter = getattr(value, "unconstrained", None) if isinstance(value, Tensor) else None
    return None if parameter is None else pyro.get_param_store().param_name(parameter())


def _check_gradients(recording: Recording, evaluation: Evaluation) -> None:
    """Raise an error if a graph leaves out a gradient that the program gave."""
    found = recording.graph.result()
    own = zip(recording.parameters().items(), found.gradients, strict=True)
    given = {
        name
        for (name, parameter), gradient in own
        if gradient is not None or id(parameter) in found.moved
    }
    for name, gradient in zip(evaluation.parameters, evaluation.gradients, strict=True):
        if gradient is not None and name not in given:
            raise UncapturableError(
                f"its graph has no gradient of {name}, as under checkpoint(use_reentrant=True)"
            )


def _device(call: Call, parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of the parameters, else of the modules."""
    return next((parameter.device for parameter in parameters), device_of(call.guide, call.model))


def _holders(call: Call, names: Iterable[str]) -> list[tuple[Mapping[str, Tensor], str]]:
    """Where parameters are found by name: in the store, which may hold another tensor than a module, or in the call."""
    stored = stored_parameters()
    return [(stored if name in stored else call.also, name) for name in names]


def one_hot_compared() -> ReplaceFunctions:
    """Let ``one_hot`` compare with all classes, where torch reads the least and the largest class."""

    def one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
        # Torch raises an error for other classes; and this is one guard for all right ones.
        if num_classes < 0 or not ((classes >= 0) & (classes < num_classes)).all():
            return nn.functional.one_hot(classes, num_classes)
        return (classes[..., None] == torch.arange(num_classes, device=classes.device)).long()

    return ReplaceFunctions({nn.functional.one_hot: one_hot})


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Suspend garbage collection, which would delete the parameters of other guides while Pyro's store is read."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _put(places: Sequence[Place], values: Sequence[Any]) -> Iterator[None]:
    """Let places have other values in the block."""
    before = [place.now() for place in places]
    for place, value in zip(places, values, strict=True):
        place.put(value)
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.put(value)


def _nearby(number: float) -> float:
    """Another number of the same type, likely also in the domain of the program."""
    if isinstance(number, int):
        return number - 1 if number > 1 else number + 1
    return number * (1.0 - 2.0**-7) if number else 2.0**-7


def _recorded(
    program: Program,
    before: State,
    positions: Sequence[int],
    places: Sequence[Place],
    change: Callable[[float], float],
) -> tuple[Graph, dict[str, Tensor]]:
    """Return the graph of a program with inputs for numbers at some positions and places, and its parameters.

    :param change: a function of the numbers to record with others.
    """
    call, first, leaves = program.call, program.first, list(program.leaves.values)
    rebuilt = rebuilder(call.args, call.kwargs)
    tensor_positions = [place for place, value in enumerate(leaves) if isinstance(value, Tensor)]
    device, dtype = _device(call, program.parameters.values()), dtype_of(call.guide, call.model)
    given = [as_tensor_of(change(leaves[position]), dtype, device) for position in positions]
    in_state = [as_tensor_of(change(place.now()), dtype, device) for place in places]
    # A 0-d tensor does not change the dtype of results.
    scales = {scale: torch.tensor(scale, dtype=dtype, device=device) for scale in first.seen}
    trained: dict[str, Tensor] = {}
    reached: list[Tensor] = []

    def run(weight: Tensor, *tensors: Tensor) -> Evaluation:
        inputs = iter(tensors)
        for position in positions:
            leaves[position] = next(inputs)
        values = [next(inputs) for _ in places]
        for position in tensor_positions:
            leaves[position] = next(inputs)
        args, kwargs = rebuilt(leaves)
        handler = Inputs(scales, first.observed)
        with _put(places, values), handler, replaced_buffers() as buffers:
            own = call._replace(
                args=args, kwargs=kwargs, weight=weight if call.weight else 0.0, share=1.0
            )
            evaluation = evaluate(own, reached)
        trained.update(evaluation.parameters)
        put_buffers_back(buffers, write=True)
        terms = None if evaluation.terms is None else vars(evaluation.terms)
        kept: Any = terms and {name: term for name, term in terms.items() if name not in HOST_TERMS}
        return evaluation._replace(parameters={}, terms=kept)

    arguments = [leaves[position].detach() for position in tensor_positions]
    numbers = [torch.ones((), device=device), *given, *in_state]
    try:
        with remove_host_reads(), one_hot_compared():
            graph = record(run, numbers, arguments, before.tensors, program.changed)
        _check_named(graph, reached, trained, before)
    except Exception as error:
        raise UncapturableError(_why(error)) from error
    names = [*positions, *(place.path for place in places)]
    read = [name for name, n in zip(names, numbers[1:], strict=True) if id(n) in graph.read]
    if read:
        raise NumbersReadError(*read)
    return graph, trained


def _check_named(
    graph: Graph, reached: Iterable[Tensor], trained: Mapping[str, Tensor], before: State
) -> None:
    """Raise an error if a tensor that no ``param`` statement names would get a gradient."""
    outside = {id(constant) for constant in graph.constants} - {
        id(parameter) for parameter in trained.values()
    }
    paths = {
        id(value): place.path for place, value in zip(before.places, before.values, strict=True)
    }
    for tensor in reached:
        if id(tensor) in outside:
            path = paths.get(id(tensor), "a tensor")
            raise UncapturableError(
                f"{path} of shape {tuple(tensor.shape)} requires a gradient, and no param statement names it; "
                "register its module with pyro.module, give a torch optimizer that has it, or detach it"
            )


def _check_alike(first: Graph, second: Graph) -> None:
    """Raise an error if two recordings differ."""
    terms = ((graph.result().terms or {}).values() for graph in (first, second))
    one, other = (
        [site for named in values if isinstance(named, dict) for site in named] for values in terms
    )
    if one != other:
        raise UncapturableError(f"its sites differ between two runs: {one} and {other}")
    if (first.module.code, first.leaves) != (second.module.code, second.leaves) or not all(
        a is b or (described(a) == described(b) and torch.equal(a, b))
        for a, b in zip(first.constants, second.constants, strict=True)
    ):
        raise UncapturableError(
            "two runs of it with the same torch noise are two different graphs, so it draws random numbers from "
            "Python or NumPy, or depends on something else that changes"
        )


def _why(error: BaseException) -> str:
    """Return the reason, and the line that led to it: the last of the user's, else the last of Pyro's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    while error.__cause__ is not None:
        error = error.__cause__
        frames += traceback.walk_tb(error.__traceback__)
    named = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_filename, number)
        for frame, number in frames
    ]
    found = [
        (file, number)
        for name, file, number in named
        if not (is_library(name) or file.startswith("<"))
    ]
    found = found or [(file, number) for name, file, number in named if name.startswith("pyro.")]
    reason = (
        str(error)
        if isinstance(error, UncapturableError)
        else f"{type(error).__name__}: {error}".splitlines()[0]
    )
    return f"{reason} ({line(*found[-1])})" if found else reason
