# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Evaluate a loss once: its value, its terms and its gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.infer import (
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    TraceGraph_ELBO,
    TraceTailAdaptive_ELBO,
)
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.compat import (
    gradient_hooks,
    hooks_later,
    stored_parameters,
    surrogate_loss,
)
from pyro_radial._pyro.types import Args, Guide, Kwargs, Model
from pyro_radial.infer.loss.elbo import TermsELBO, entropies
from pyro_radial.infer.loss.terms import LossTerms, as_tensor
from pyro_radial.infer.step.optimizer import unconstrained_parameters

# Losses of Pyro that compile their programs.
JITTED = (JitTrace_ELBO, JitTraceEnum_ELBO, JitTraceGraph_ELBO, JitTraceMeanField_ELBO)
NOTHING: Mapping[str, Tensor] = {}


class Mode(StrEnum):
    """How a program ran: as it is, or as a graph."""

    AS_IT_IS = "as it is"
    RECORDED = "recorded"
    COMPILED = "compiled"
    CAPTURED = "captured"


class Call(NamedTuple):
    """The arguments of one evaluation of a loss.

    :param gradients: whether to compute gradients.
    :param extra_parameters: trained parameters that no ``param`` statement has, by name.
    :param weight: the weight of the KL, for a loss with terms; a 0-d tensor while a graph is recorded.
    :param step: the step's number, counted from one, for a loss with terms.
    :param optimizer: the optimizer of this step; a graph on a GPU may contain its step.
    :param eager_optimizer_reason: why the optimizer's step must not be in the graph; None if it may be.
    :param stopped: a 0-d tensor that a graph with the optimizer's step sets to one at a loss that is not finite; from
        then on steps change nothing.
    :param gradient_scale: a factor of the gradients; the loss is not scaled.
    :param attached: whether the loss of a program that runs as it is stays attached to autograd for a ``backward`` by
        the user, in place of gradients here.
    :param check: a function of the terms of the loss that raises an error if they are wrong, wherever the program runs.
    """

    loss: Any
    model: Model
    guide: Guide
    args: Args
    kwargs: Kwargs
    gradients: bool = True
    extra_parameters: Mapping[str, Tensor] = NOTHING
    weight: float | Tensor = 1.0
    step: int = 0
    optimizer: Optimizer | None = None
    eager_optimizer_reason: str | None = None
    stopped: Tensor | None = None
    gradient_scale: float = 1.0
    attached: bool = False
    check: Callable[[LossTerms], None] | None = None


class LossEvaluation(NamedTuple):
    """The result of an evaluation.

    :param loss: a 0-d tensor, or a vector if the program returns a tuple of losses; detached unless ``attached``.
    :param gradients: one for each parameter; None if the loss does not depend on it, or if a graph has taken the step.
    :param parameters: the unconstrained parameters, by name in Pyro's store.
    :param terms: the terms of the loss; None for a loss without terms.
    :param nonfinite: a 0-d tensor, one if the loss is not finite.
    :param summary: the loss, negative log-likelihood and KL in nats per datum, if the loss has terms.
    :param hooked: whether the gradients' hooks have been called.
    :param mode: how the program ran; tensors of a captured program are overwritten by its next step.
    :param stepped: whether the evaluation included the whole step of the optimizer.
    :param attached: whether the loss is still attached to autograd, and the gradients here are None.
    """

    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    parameters: dict[str, Tensor]
    nonfinite: Tensor
    terms: LossTerms | None = None
    summary: Tensor | None = None
    hooked: bool = False
    mode: Mode = Mode.AS_IT_IS
    stepped: bool = False
    attached: bool = False

    def parameters_with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter that the loss depends on, with its gradient after hooks."""
        gradients = zip(self.parameters.values(), self.gradients, strict=True)
        pairs = [(parameter, gradient) for parameter, gradient in gradients if gradient is not None]
        return pairs if self.hooked else after_hooks(pairs)


def after_hooks(
    parameters_with_gradients: Sequence[tuple[Tensor, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """Return parameters with what their hooks leave of their gradients, without those that a hook has removed."""
    with_hooks = [pair for pair in parameters_with_gradients if gradient_hooks(pair[0])]
    if not with_hooks:
        return list(parameters_with_gradients)
    hooked, gradients = zip(*with_hooks, strict=True)
    earlier_gradients = _pop_gradients(hooked)
    try:
        # Torch calls all hooks, also those of several parameters, in one backward pass.
        torch.autograd.backward(hooked, gradients)
        changed = {id(parameter): gradient for parameter, gradient in _pop_gradients(hooked)}
    finally:
        for parameter, gradient in earlier_gradients:
            parameter.grad = gradient
    pairs: list[tuple[Tensor, Tensor]] = []
    for parameter, usual in parameters_with_gradients:
        gradient = changed.get(id(parameter), usual)
        if gradient is not None:
            pairs.append((parameter, gradient))
    return pairs


def evaluate_loss(call: Call) -> LossEvaluation:
    """Run a program once as it is, and return its loss, its parameters as ``SVI`` finds them, and their gradients."""
    differentiable = why_not_differentiable(call.loss) is None
    # A loss that calls ``backward`` itself adds to gradients, so earlier ones are set aside until the end.
    earlier_gradients = _pop_gradients(
        [*stored_parameters().values(), *call.extra_parameters.values()]
    )
    evaluation = _run_program(call, differentiable)
    parameters = evaluation.parameters.values()
    attached = call.attached and call.gradients and differentiable
    if differentiable and call.gradients and not attached and evaluation.loss.requires_grad:
        scaled_loss = evaluation.loss
        if call.gradient_scale != 1.0:
            scaled_loss = scaled_loss * call.gradient_scale
        # As in SVI, every tensor that the loss depends on gets a gradient.
        with hooks_later(parameters):
            scaled_loss.backward(retain_graph=getattr(call.loss, "retain_graph", None))
    gradients = [parameter.grad for parameter in parameters]
    _pop_gradients(parameters)
    for parameter, gradient in earlier_gradients:
        parameter.grad = gradient
    if call.check is not None and evaluation.terms is not None:
        call.check(evaluation.terms)
    return evaluation._replace(
        loss=evaluation.loss if attached else evaluation.loss.detach(),
        gradients=_in_separate_memory(gradients),
        hooked=not differentiable,
        attached=attached,
    )


def evaluate_loss_in_graph(call: Call) -> tuple[LossEvaluation, list[Tensor]]:
    """Run a program while its operations are recorded, with the gradients as operations.

    :returns: the evaluation, and the leaf tensors that would get a gradient in ``SVI``.
    """
    evaluation = _run_program(call, differentiable=True)
    loss = evaluation.loss
    parameters = list(evaluation.parameters.values())
    gradients: Sequence[Tensor | None] = (None,) * len(parameters)
    leaves: list[Tensor] = []
    if call.gradients and loss.requires_grad:
        leaves = _gradient_leaves(loss)
        if parameters:
            with hooks_later(parameters):
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    evaluation = evaluation._replace(loss=loss.detach(), gradients=_in_separate_memory(gradients))
    return evaluation, leaves


def _run_program(call: Call, differentiable: bool) -> LossEvaluation:
    """Run a program, and return an evaluation without gradients, whose loss is attached."""
    with poutine.trace(param_only=True) as param_trace:
        loss, terms = _loss_and_terms(call, differentiable)
    parameters = _parameters_in(param_trace.trace)
    traced_parameters = set(parameters.values())
    for name, parameter in call.extra_parameters.items():
        if parameter.requires_grad and parameter not in traced_parameters:
            parameters[name] = parameter
    # The tail-adaptive loss has gradients but no value.
    has_value = not isinstance(call.loss, TraceTailAdaptive_ELBO)
    nonfinite = ~torch.isfinite(loss.detach()) if has_value else torch.isnan(loss.detach())
    return LossEvaluation(
        loss,
        (),
        parameters,
        nonfinite=nonfinite.any().float(),
        terms=terms,
        summary=None if terms is None else _summary(terms),
    )


def why_not_differentiable(loss: Any) -> str | None:
    """Return why autograd cannot differentiate the result of a loss, so that it has no graph; None if it can."""
    if not hasattr(loss, "loss_and_grads") or type(loss) is TraceGraph_ELBO:
        return None
    name = type(loss).__name__
    if isinstance(loss, JITTED):
        return f"{name} compiles it itself, more slowly; use {name.removeprefix('Jit')}"
    if _overrides_gradients(loss) or not hasattr(loss, "differentiable_loss"):
        return f"{name} computes its gradients in loss_and_grads, not in differentiable_loss"
    return None


def _overrides_gradients(loss: Any) -> bool:
    """Return whether the class of a loss overrides ``loss_and_grads`` but not ``differentiable_loss``."""
    for names in (vars(loss), *map(vars, type(loss).__mro__)):
        if "differentiable_loss" in names or "loss_and_grads" in names:
            return "differentiable_loss" not in names
    return False


def has_terms(loss: Any) -> bool:
    """Return whether a loss is a ``TermsELBO`` that computes its value as that class does."""
    differentiable_loss = getattr(type(loss), "differentiable_loss", None)
    return (
        isinstance(loss, TermsELBO)
        and differentiable_loss is TermsELBO.differentiable_loss
        and not _overrides_gradients(loss)
    )


def keep_terms(call: Call, evaluation: LossEvaluation) -> LossEvaluation:
    """Complete the terms of a graph, and store them in the loss, where users can read them."""
    terms = evaluation.terms
    if terms is None or not has_terms(call.loss):
        return evaluation
    if evaluation.mode != Mode.AS_IT_IS:
        site_entropies = partial(_guide_entropies, call.guide, call.args, call.kwargs)
        terms = replace(terms, kl_weight=call.weight, entropies=site_entropies)
    # The next captured step overwrites the terms, so they are copied when a user reads them.
    is_captured = evaluation.mode == Mode.CAPTURED
    call.loss.keep(
        partial(terms.map, Tensor.clone) if is_captured else lambda: terms, call.gradients
    )
    return evaluation._replace(terms=terms)


def _guide_entropies(guide: Guide, args: Args, kwargs: Kwargs) -> dict[str, Tensor]:
    """Return the entropies of a guide's sites at its current parameters."""
    with torch.no_grad(), torch.random.fork_rng([]), poutine.block():
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
    return entropies(dict(trace.iter_stochastic_nodes()))


def _loss_and_terms(call: Call, differentiable: bool) -> tuple[Tensor, LossTerms | None]:
    """Run the program, and return its loss as a tensor, and its terms or None."""
    loss, model, guide, args, kwargs = call[:5]
    if has_terms(loss):
        with torch.set_grad_enabled(call.gradients):
            return loss.loss_and_terms(model, guide, args, kwargs, call.weight, call.step)
    if differentiable and type(loss) is TraceGraph_ELBO:
        function = partial(surrogate_loss, loss)
    elif differentiable:
        function = getattr(loss, "differentiable_loss", loss)
    else:
        function = loss.loss_and_grads if call.gradients else loss.loss
    # Losses of Pyro that enumerate refuse to do without gradients.
    with torch.enable_grad():
        value = function(model, guide, *args, **kwargs)
    if isinstance(value, tuple):
        return torch.stack(list(map(as_tensor, value))), None
    return as_tensor(value), loss.terms if hasattr(type(loss), "terms") else None


def _summary(terms: LossTerms) -> Tensor:
    """Return the loss, the negative log-likelihood and the KL per datum, as :func:`~pyro_radial.fit` records them."""
    per_datum = terms if terms.num_data is None else terms.per_datum()
    return torch.stack([per_datum.loss, per_datum.negative_log_likelihood, per_datum.kl]).detach()


def _pop_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Set the gradients of parameters to None, and return each parameter with the gradient that it had."""
    earlier_gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in earlier_gradients:
        parameter.grad = None
    return earlier_gradients


def _in_separate_memory(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return gradients that share no memory, so that each can be changed in place."""
    used_storages: set[int] = set()
    separate_gradients: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout is torch.strided:
            storage = gradient.untyped_storage()
            has_separate_memory = (
                gradient.is_contiguous()
                and len(storage) == gradient.nbytes
                and storage._cdata not in used_storages
            )
            gradient = (
                gradient
                if has_separate_memory
                else gradient.clone(memory_format=torch.contiguous_format)
            )
            used_storages.add(gradient.untyped_storage()._cdata)
        separate_gradients.append(gradient)
    return tuple(separate_gradients)


def _parameters_in(trace: poutine.Trace) -> dict[str, Tensor]:
    """Return the unconstrained parameters in a trace, as in ``SVI``: each once, under its first name."""
    names: dict[Tensor, str] = {}
    for name, value in unconstrained_parameters(trace).items():
        if value.requires_grad:
            names.setdefault(value, name)
    return {name: parameter for parameter, name in names.items()}


def _gradient_leaves(value: Tensor) -> list[Tensor]:
    """Return the leaf tensors of autograd's graph that the gradient of a value reaches."""
    nodes: list[Any] = [value.grad_fn]
    visited = set(nodes)
    for node in nodes:
        next_nodes = {
            next_node for next_node, _ in node.next_functions if next_node is not None
        } - visited
        visited |= next_nodes
        nodes.extend(next_nodes)
    return [node.variable for node in nodes if hasattr(node, "variable")]
