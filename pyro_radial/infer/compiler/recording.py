# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Record a Pyro program, with its loss, the terms and the gradients, as a graph of tensor operations.

A program is a model, its guide and a loss. An argument, a number or an attribute that it reads is an input of its graph
or is compared before each replay.
"""

import gc
import math
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions import Delta
from pyro.infer import TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions.constraints import Constraint, integer_interval

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import (
    ReplaceFunctions,
    is_subsample,
    remove_host_reads,
    stored_parameters,
)
from pyro_radial._pyro.random_numbers import TorchNoise, host_noise
from pyro_radial._pyro.types import Message
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.compiler.program import Program
from pyro_radial.infer.compiler.signature import (
    Leaves,
    Numbers,
    descriptions,
    is_number,
    number_tensor,
    rebuilder,
)
from pyro_radial.infer.compiler.state import (
    Code,
    Refused,
    Slot,
    State,
    first_line,
    is_library,
    line,
    metadata_of,
)
from pyro_radial.infer.compiler.tensor_graph import (
    ChangedTensors,
    Graph,
    note_replaced_buffers,
    record,
    restore_after,
    restore_buffers,
    restore_tensors,
)
from pyro_radial.infer.loss.not_finite import support_to_check
from pyro_radial.infer.step.evaluation import (
    Call,
    LossEvaluation,
    evaluate_loss,
    evaluate_loss_in_graph,
)
from pyro_radial.nn.modules import device_of, dtype_of


class RecordingHandler(Messenger):
    """A Pyro handler around a run: it notes the scales and checks of sites, and replaces them in a recorded run.

    A scale such as N / B becomes a 0-d tensor, which the graph reads instead of fixing the number. A graph skips Pyro's
    checks of observations; instead the scale becomes NaN if an observation is outside of its support.

    :param scales: the 0-d tensor for each scale; other scales stay numbers.
    :param checked_sites: the names of the sites with observations to check by operations of the graph.
    """

    def __init__(self, scales: Mapping[float, Tensor], checked_sites: Collection[str] = ()) -> None:
        super().__init__()
        self.scales = scales
        self.checked_sites = checked_sites
        #: The scales of the sites in the run, without 0 and 1.
        self.site_scales: list[float] = []
        #: The names of observed sites that Pyro checks.
        self.observed_sites: set[str] = set()
        #: The log-density of each Delta of the guide by site.
        self.delta_log_densities: dict[str, Any] = {}
        #: The names of latent sites whose draws have no gradient.
        self.scored_sites: list[str] = []
        #: The names of plates that draw their rows, and those of the guide's for which the model has given rows.
        self.drawn_plates: set[str] = set()
        self.given_plates: set[str] = set()

    def _pyro_sample(self, msg: Message) -> None:
        """Note and replace the scale of a site, and note or check its observation."""
        scale = msg["scale"]
        if isinstance(scale, int | float) and scale not in (0, 1):
            self.site_scales.append(scale)
            msg["scale"] = self.scales.get(scale, scale)
        distribution = leaf(msg["fn"])
        if isinstance(distribution, Delta) and not (msg["done"] or msg["is_observed"]):
            self.delta_log_densities[msg["name"]] = distribution.log_density
        if is_subsample(msg):
            self._note_rows(msg)
        elif not (msg["done"] or msg["is_observed"] or getattr(msg["fn"], "has_rsample", False)):
            self.scored_sites.append(msg["name"])
        support = support_to_check(msg)
        if support is None:
            return
        if msg["name"] in self.checked_sites:
            _check_in_graph(msg, support)
        elif getattr(distribution, "_validate_args", False):
            self.observed_sites.add(msg["name"])

    def _note_rows(self, msg: Message) -> None:
        """Note a plate that draws its rows, or one of the model that has these rows in place of given ones."""
        if msg["value"] is None:
            self.drawn_plates.add(msg["name"])
        # A plate without a size of its subsample draws no rows, so less than all were given.
        elif msg["fn"].subsample_size is None and len(msg["value"]) < msg["fn"].size:
            self.given_plates.add(msg["name"])


def _check_in_graph(msg: Message, support: Constraint) -> None:
    """Make a site's scale NaN if its observed value is outside of the support, by operations of the graph."""
    # Checks of counts take a remainder, which takes half as long as their likelihood; floor is faster.
    with ReplaceFunctions({Tensor.remainder: lambda number, _: number - number.floor()}):
        allowed = support.check(msg["value"])
    msg["scale"] = torch.where(allowed.all(), msg["scale"], math.nan)
    if isinstance(support, integer_interval):
        # A class out of range must not index outside of the table of log-probabilities.
        msg["value"] = torch.where(allowed, msg["value"], 0)


HOST_NOISE = "it draws random numbers from Python or NumPy, which a graph would draw once; draw them with torch"
# Paths of state that need no comparison, because the weight of the KL is an input of the graph.
UNREAD = ("loss.step", "loss.kl_weight")


class FirstRun(NamedTuple):
    """A program after one usual run, with the results of this run that recording needs.

    :param handler: has noted the scales and the checked sites.
    :param parameters: the parameters by name.
    :param changed_tensors: the tensors that the run changed in place, or assigned to buffers.
    :param device: the device of the parameters, or of the modules if there are no parameters.
    """

    call: Call
    leaves: Leaves
    handler: RecordingHandler
    parameters: Mapping[str, Tensor]
    changed_tensors: Sequence[Tensor]
    device: torch.device
    dtype: torch.dtype


def record_program(
    call: Call, leaves: Leaves, numbers: Numbers
) -> tuple[LossEvaluation, Program | Refused]:
    """Run a program once as usual, then record it.

    With a program, tensors, buffers and noise are as before the usual run; if it was refused, they are as after it.

    :param numbers: the numbers that become inputs of the graph; numbers that Python reads are excluded here.
    :returns: the result of the usual run, and the program, or why it cannot be recorded.
    """
    noise = TorchNoise.current()
    changes = ChangedTensors()
    code = Code()
    handler = RecordingHandler({})
    noise_of_host = host_noise()
    with note_replaced_buffers() as buffers, changes, handler, code.watch():
        evaluation = evaluate_loss(call._replace(optimizer=None, attached=False))
    if isinstance(call.loss, TraceMeanField_ELBO) and not hasattr(call.loss, "loss_and_terms"):
        _warn_of_jacobians(handler.delta_log_densities)
    for name in sorted(handler.drawn_plates & handler.given_plates):
        warn(
            f"the guide draws the rows of the plate '{name}' by itself, in place of those that the model gives; if the "
            "model has the data of these rows, let the guide make the same plate, as by create_plates"
        )
    changed = changes.tensors()
    for _, previous, latest in buffers.values():
        if latest is not previous and isinstance(latest, Tensor):
            changed.append(latest)
    devices = [parameter.device for parameter in evaluation.parameters.values()]
    first_run = FirstRun(
        call,
        leaves,
        handler,
        evaluation.parameters,
        changed,
        device=devices[0] if devices else device_of(call.guide, call.model),
        dtype=dtype_of(call.guide, call.model),
    )
    try:
        if isinstance(call.loss, TraceGraph_ELBO) and handler.scored_sites:
            raise Refused(
                f"TraceGraph_ELBO computes its gradients by scores of {handler.scored_sites}, which have no rsample"
            )
        if host_noise() != noise_of_host:
            # The first run may do more than later ones, such as find a start by k-means.
            raise Refused(HOST_NOISE, may_try_again=True)
        program = _record_with_numbers(numbers, first_run, code)
        _check_gradients(program, evaluation)
        # This raises an error if the program has made an argument require a gradient.
        descriptions(leaves.values, numbers.positions)
    except Refused as refused:
        if call.attached:
            noise.restore()
            evaluation = evaluate_loss(call)
        return evaluation, refused
    restore_buffers(buffers)
    restore_tensors(changes.originals)
    noise.restore()
    # The state was read with the buffers of the first run; this call takes over the restored ones.
    program.is_state_valid()
    return evaluation, program


def _warn_of_jacobians(log_densities: Mapping[str, Any]) -> None:
    """Warn if Deltas of a guide have log-densities, which ``TraceMeanField_ELBO`` leaves out of the loss."""
    sites = [
        name for name, log_density in log_densities.items() if torch.as_tensor(log_density).any()
    ]
    if sites:
        warn(
            f"TraceMeanField_ELBO leaves out the log-Jacobian of {sites}; use TermsELBO or the guide AutoMeanField"
        )


def _record_with_numbers(numbers: Numbers, first_run: FirstRun, code: Code) -> Program:
    """Record a program with numbers as inputs; if Python reads some of them, try again without these."""
    while numbers:
        try:
            return _record_twice(first_run, numbers, code)
        except Refused as refused:
            if refused.read_numbers:
                numbers.exclude(refused.read_numbers)
            else:
                numbers.exclude_all()
    return _record_twice(first_run, numbers, code)


def _record_twice(first_run: FirstRun, numbers: Numbers, code: Code) -> Program:
    """Record a program twice, with different numbers, and raise an error if the two graphs differ.

    The second recording finds what torch's noise and the inputs do not determine. The state and tensors are restored.
    """
    call = first_run.call
    classes = [value for value in first_run.leaves.values if isinstance(value, type)]
    roots = {"model": call.model, "guide": call.guide, "loss": call.loss, "arguments": classes}
    initial_state = State(roots, code, _parameter_holders(call, first_run.parameters))
    if initial_state.unreadable_reason is not None:
        # The first run may do more than later ones, such as find a start by k-means.
        raise Refused(initial_state.unreadable_reason, may_try_again=True)
    values = first_run.leaves.values
    positions = [number for number in sorted(numbers.positions) if is_number(values[number])]
    number_slots = [
        slot
        for slot in initial_state.slots
        if slot.path in numbers.paths and is_number(slot.read())
    ]
    recorded_values = [values[position] for position in positions]
    recorded_values += [slot.read() for slot in number_slots]
    # If a graph fixes a number that should be an input, the graph of another number differs.
    nearby_values = list(map(_nearby_number, recorded_values))
    noise = TorchNoise.current()
    ignored = set(UNREAD)
    recorded: list[tuple[Graph, dict[str, Tensor]]] = []
    for inputs in (recorded_values, nearby_values):
        try:
            with restore_after(first_run.changed_tensors):
                graph, parameters = _record_once(
                    first_run, initial_state, positions, number_slots, inputs
                )
            recorded.append((graph, parameters))
            changes = initial_state.changes(count_replaced=True)
            parameter_slots = _find_parameter_slots(initial_state, set(graph.constants))
        finally:
            initial_state.restore()
            noise.restore()
        harmless = {slot.path for slot, _ in parameter_slots}
        for path, in_user_code in changes:
            ignored.add(path)
            if in_user_code and path not in harmless:
                raise Refused(
                    f"it changes {path} while it runs{code.line_of(path)}, which a graph cannot do; keep a tensor in a "
                    "buffer, or change it between steps"
                )
    (graph, parameters), (second_graph, _) = recorded
    _check_same_graph(graph, second_graph)
    typed_slots: list[tuple[Slot, type]] = []
    for slot in number_slots:
        ignored.add(slot.path)
        typed_slots.append((slot, type(slot.read())))
    state = State(roots, code, _parameter_holders(call, parameters), ignored, graph.host_reads)
    return Program(
        graph,
        state,
        positions,
        typed_slots,
        device=first_run.device,
        parameter_store=stored_parameters(),
        parameters=parameters,
        constants=graph.constants,
        parameter_slots=parameter_slots,
    )


def _find_parameter_slots(
    initial_state: State, read_tensors: Collection[Tensor]
) -> list[tuple[Slot, str]]:
    """Return the slots in which a run has replaced a parameter's value by its new value, with the parameters' names.

    Such a slot is an attribute to which the model assigns the result of a ``param`` statement.

    :param initial_state: the state before the run.
    :param read_tensors: tensors that the run has read; a slot that held one of them does not count.
    """
    parameter_slots: list[tuple[Slot, str]] = []
    for slot, value in zip(initial_state.slots, initial_state.values, strict=True):
        current = slot.read()
        name = None if current is value else _name_of_parameter(current)
        if name is not None and name == _name_of_parameter(value) and value not in read_tensors:
            parameter_slots.append((slot, name))
    return parameter_slots


def _name_of_parameter(value: Any) -> str | None:
    """Return the name of the parameter if a value comes from a ``param`` statement, else None."""
    parameter = getattr(value, "unconstrained", None) if isinstance(value, Tensor) else None
    return None if parameter is None else pyro.get_param_store().param_name(parameter())


def _check_gradients(program: Program, evaluation: LossEvaluation) -> None:
    """Raise an error if a parameter had a gradient in the usual run, and has none in the graph.

    Otherwise steps on the graph would not train it.
    """
    # Without a run, its structure: a class in place of each tensor, and None where the graph has no gradient.
    graph_evaluation = program.graph.result()
    graph_gradients = dict(zip(program.parameters, graph_evaluation.gradients, strict=True))
    for name, gradient in zip(evaluation.parameters, evaluation.gradients, strict=True):
        if gradient is not None and graph_gradients.get(name) is None:
            raise Refused(
                f"its graph has no gradient of {name}, as under checkpoint(use_reentrant=True)"
            )


def _parameter_holders(call: Call, names: Iterable[str]) -> list[tuple[Mapping[str, Tensor], str]]:
    """Return the mapping that holds each named parameter, with the name: Pyro's store, or ``call.extra_parameters``.

    Those are trained parameters that no ``param`` statement has, such as those in a torch optimizer. The store counts
    first, because an extra parameter may have the name of another tensor in the store.
    """
    stored = stored_parameters()
    return [(stored if name in stored else call.extra_parameters, name) for name in names]


def compare_in_one_hot() -> ReplaceFunctions:
    """Return a block in which ``one_hot`` compares with all classes, since torch's own reads values in Python."""

    def one_hot(classes: Tensor, num_classes: int = -1) -> Tensor:
        # Torch raises the error for a class out of range. This test becomes one guard that all valid classes pass.
        if num_classes < 0 or not ((classes >= 0) & (classes < num_classes)).all():
            return nn.functional.one_hot(classes, num_classes)
        return (classes[..., None] == torch.arange(num_classes, device=classes.device)).long()

    return ReplaceFunctions({nn.functional.one_hot: one_hot})


@contextmanager
def suspend_garbage_collection() -> Iterator[None]:
    """Stop Python's garbage collector in the block.

    Otherwise it could delete parameters of other guides from Pyro's store while the store is read.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _nearby_number(number: float) -> float:
    """Return a slightly different number of the same type, which the program most likely accepts too."""
    if isinstance(number, int):
        return number - 1 if number > 1 else number + 1
    return number * (1.0 - 2.0**-7) if number else 2.0**-7


def _record_once(
    first_run: FirstRun,
    initial_state: State,
    positions: Sequence[int],
    number_slots: Sequence[Slot],
    values: Sequence[float],
) -> tuple[Graph, dict[str, Tensor]]:
    """Record one run of a program, and return its graph and its parameters by name.

    :param initial_state: the state that the program can read.
    :param positions: the positions of numbers among the arguments that become inputs of the graph.
    :param number_slots: the slots of numbers in the state that become inputs of the graph.
    :param values: the numbers of this run: at the positions, then in the slots.
    :raises Refused: if the run cannot be recorded, or if Python reads one of the numbers.
    """
    call = first_run.call
    leaves = list(first_run.leaves.values)
    rebuild = rebuilder(call.args, call.kwargs)
    device = first_run.device
    dtype = first_run.dtype
    numbers = [number_tensor(value, device) for value in values]
    # A 0-d tensor does not change the dtype of results.
    scales: dict[float, Tensor] = {
        scale: torch.tensor(scale, dtype=dtype, device=device)
        for scale in first_run.handler.site_scales
    }
    tensor_positions = [
        position for position, value in enumerate(leaves) if isinstance(value, Tensor)
    ]
    arguments = [leaves[position].detach() for position in tensor_positions]
    for argument, position in zip(arguments, tensor_positions, strict=True):
        vars(argument).update(vars(leaves[position]))
    parameters_by_name: dict[str, Tensor] = {}
    gradient_leaves: list[Tensor] = []

    def run(weight: Tensor, *tensors: Tensor) -> LossEvaluation:
        """Evaluate the loss with tensors in place of numbers and of the tensors among the arguments."""
        inputs = iter(tensors)
        for position in positions:
            leaves[position] = next(inputs)
        original_numbers = [slot.read() for slot in number_slots]
        for slot in number_slots:
            slot.write(next(inputs))
        for position in tensor_positions:
            leaves[position] = next(inputs)
        args, kwargs = rebuild(leaves)
        # A weight of zero has a separate graph, which may leave out the KL.
        kl_weight = weight if call.weight else 0.0
        handler = RecordingHandler(scales, first_run.handler.observed_sites)
        with handler, note_replaced_buffers() as buffers:
            recorded_call = call._replace(args=args, kwargs=kwargs, weight=kl_weight)
            evaluation, leaf_tensors = evaluate_loss_in_graph(recorded_call)
            gradient_leaves[:] = leaf_tensors
        # If the run raises an error, the caller restores the state.
        for slot, number in zip(number_slots, original_numbers, strict=True):
            slot.write(number)
        parameters_by_name.update(evaluation.parameters)
        restore_buffers(buffers, write=True)
        return evaluation._replace(parameters={})

    weight = torch.ones((), device=device)
    try:
        with remove_host_reads(), compare_in_one_hot():
            graph = record(
                run,
                [weight, *numbers],
                arguments,
                initial_state.tensors,
                first_run.changed_tensors,
                dtype,
            )
        _check_parameters_are_named(graph, gradient_leaves, parameters_by_name, initial_state)
    except Exception as error:
        raise Refused(_reason_of(error)) from error
    # The origin of each number: a position in the arguments, or a path in the state.
    origins: list[int | str] = [*positions, *(slot.path for slot in number_slots)]
    read_origins: list[int | str] = [
        origin
        for origin, number in zip(origins, numbers, strict=True)
        if number in graph.host_reads
    ]
    if read_origins:
        raise Refused("Python reads numbers", read_numbers=read_origins)
    return graph, parameters_by_name


def _check_parameters_are_named(
    graph: Graph,
    gradient_leaves: Iterable[Tensor],
    parameters_by_name: Mapping[str, Tensor],
    initial_state: State,
) -> None:
    """Raise an error if a tensor that no ``param`` statement names requires a gradient of the loss.

    :param gradient_leaves: the tensors that the gradient of the loss reaches.
    :param parameters_by_name: the parameters by name.
    """
    unnamed_tensors = set(graph.constants) - set(parameters_by_name.values())
    for tensor in gradient_leaves:
        if tensor in unnamed_tensors:
            path = "a tensor"
            for slot, value in zip(initial_state.slots, initial_state.values, strict=True):
                if value is tensor:
                    path = slot.path
            raise Refused(
                f"{path} of shape {tuple(tensor.shape)} requires a gradient, and no param statement names it; "
                "register its module with pyro.module, give a torch optimizer that has it, or detach it"
            )


def _check_same_graph(graph: Graph, second_graph: Graph) -> None:
    """Raise an error that says how two recordings of a program differ, if they do."""
    sites = list(terms_by_site(graph.result()))
    second_sites = list(terms_by_site(second_graph.result()))
    if sites != second_sites:
        raise Refused(f"its sites differ between two runs: {sites} and {second_sites}")
    if not _are_same_graph(graph, second_graph):
        raise Refused(
            "two runs of it with the same torch noise are two different graphs, so it depends on something that changes"
        )


def terms_by_site(evaluation: LossEvaluation) -> dict[str, Any]:
    """Return the terms of a loss by site, where they are in dicts; in the result of no run, ``Tensor`` for each."""
    by_site: dict[str, Any] = {}
    for terms in vars(evaluation.terms).values() if evaluation.terms is not None else ():
        for name, term in terms.items() if isinstance(terms, dict) else ():
            if term is Tensor or isinstance(term, Tensor):
                by_site[name] = term
    return by_site


def _are_same_graph(graph: Graph, second_graph: Graph) -> bool:
    """Return whether two graphs have the same operations, leaves and constants."""
    if graph.module.code != second_graph.module.code or graph.leaves != second_graph.leaves:
        return False
    for a, b in zip(graph.constants, second_graph.constants, strict=True):
        if a is not b and (metadata_of(a) != metadata_of(b) or not torch.equal(a, b)):
            return False
    return True


def _reason_of(error: BaseException) -> str:
    """Return the text of an error, with the line that led to it: the last line of the user's code, else of Pyro's."""
    frames = list(traceback.walk_tb(error.__traceback__))
    while error.__cause__ is not None:
        error = error.__cause__
        frames += traceback.walk_tb(error.__traceback__)
    in_users = ""
    in_pyro = ""
    for frame, number in frames:
        name = str(frame.f_globals.get("__name__"))
        file = frame.f_code.co_filename
        if not (is_library(name) or file.startswith("<")):
            in_users = line(file, number)
        elif name.startswith("pyro."):
            in_pyro = line(file, number)
    reason = first_line(error)
    source_line = in_users or in_pyro
    return f"{reason} ({source_line})" if source_line else reason
