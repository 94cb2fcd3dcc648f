# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss with its terms and gradients, as one value."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.infer import (
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceGraph_ELBO,
    JitTraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
)
from pyro.poutine import Trace
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.compat import (
    after_hooks,
    hooks_later,
    post_accumulate_hooks,
    stored_parameters,
)
from pyro_radial.infer.elbo import LossTerms, TermsELBO, as_tensor
from pyro_radial.infer.optim.joint import GraphOptimizer

AS_IT_IS, RECORDED, COMPILED, CAPTURED, CHECKED = (
    "as it is",
    "recorded",
    "compiled",
    "captured",
    "checked",
)
NOTHING: Mapping[str, Tensor] = {}
# Losses of Pyro that compile their programs.
JITTED = (JitTrace_ELBO, JitTraceEnum_ELBO, JitTraceGraph_ELBO, JitTraceMeanField_ELBO)


class Call(NamedTuple):
    """The arguments of one evaluation.

    :param gradients: whether to compute gradients.
    :param also: trained parameters besides those of ``param`` statements, by name.
    :param weight: the weight of the KL, for a loss with terms; a 0-d tensor while a graph is recorded.
    :param step: the number of the step, counted from one, for a loss with terms.
    :param mover: an optimizer that moves the parameters as part of the evaluation, if that is a graph.
    :param optimizer: the optimizer whose step follows, which a graph on a GPU may take itself.
    :param outside: why this optimizer must take its step after such a graph, if it must.
    :param stopped: a 0-d tensor that such a graph sets to one at a loss that is not finite; then steps do nothing.
    :param share: a factor of the gradients alone.
    :param attached: whether a loss that is not a graph's keeps its own graph for a ``backward`` by the user, in place
        of gradients.
    :param scaler: scales the gradients too, which would underflow in half precision.
    """

    loss: Any
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: bool = True
    also: Mapping[str, Tensor] = NOTHING
    weight: Any = 1.0
    step: int = 0
    mover: GraphOptimizer | None = None
    optimizer: Optimizer | None = None
    outside: str | None = None
    stopped: Tensor | None = None
    share: float = 1.0
    attached: bool = False
    scaler: torch.amp.GradScaler | None = None


class Evaluation(NamedTuple):
    """A detached loss, and what belongs to it.

    :param loss: a 0-d tensor, or one with an element for each part of the loss.
    :param gradients: one for each parameter; None if the loss does not depend on it, or if it has moved already.
    :param parameters: unconstrained, by name in Pyro's store.
    :param terms: the terms of the loss, if it has any.
    :param broken: a 0-d tensor, one if the loss is not finite.
    :param summary: the loss, negative log-likelihood and KL in nats per datum, if the loss has terms.
    :param hooked: whether the hooks of gradients have been called.
    :param moved: the ids of the parameters that the evaluation has moved.
    :param way: how the program ran: "as it is", "recorded", "compiled" or "captured", or "checked" if it ran as it is
        to check its graph. Tensors of a captured program are overwritten by its next step.
    :param stepped: whether the whole step of the optimizer was part of it.
    :param attached: whether the loss is not detached, and has no gradients here.
    """

    loss: Tensor
    gradients: tuple[Tensor | None, ...]
    parameters: dict[str, Tensor]
    broken: Tensor
    terms: LossTerms | None = None
    summary: Tensor | None = None
    hooked: bool = False
    moved: frozenset[int] = frozenset()
    way: str = AS_IT_IS
    stepped: bool = False
    attached: bool = False

    def with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter that the loss depends on, with its gradient after hooks."""
        pairs = zip(self.parameters.values(), self.gradients, strict=True)
        found = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
        if self.hooked:
            return found
        left = [(parameter, after_hooks(parameter, gradient)) for parameter, gradient in found]
        return [(parameter, gradient) for parameter, gradient in left if gradient is not None]


def evaluate(call: Call, recorded: list[Tensor] | None = None) -> Evaluation:
    """Run the program once, find its parameters as ``SVI`` does, and change nothing in the loss.

    :param recorded: if the run is recorded, a list that gets the tensors with gradients in ``SVI``.
    """
    differentiable = is_differentiable(call.loss)
    attached = call.attached and call.gradients and differentiable and recorded is None
    # A loss that calls ``backward`` adds to the gradients that there are.
    earlier = (
        []
        if recorded is not None
        else _without_gradients([*stored_parameters().values(), *call.also.values()])
    )
    with poutine.trace(param_only=True) as capture:
        value, terms = _value(call, differentiable)
    parameters = _trained(capture.trace)
    known = {id(parameter) for parameter in parameters.values()}
    parameters |= {
        name: p for name, p in call.also.items() if p.requires_grad and id(p) not in known
    }
    found: Sequence[Tensor | None] = (None,) * len(parameters)
    if differentiable and call.gradients and value.requires_grad and not attached:
        scaled = value if call.share == 1.0 else value * call.share
        scaled = scaled if call.scaler is None else call.scaler.scale(scaled)
        if recorded is not None:
            recorded += _leaves(scaled)
            found = (
                torch.autograd.grad(scaled, list(parameters.values()), allow_unused=True)
                if parameters
                else ()
            )
        else:
            # As SVI does: all that the loss depends on gets a gradient.
            with hooks_later(parameters.values()):
                scaled.backward(retain_graph=getattr(call.loss, "retain_graph", None))
    if recorded is None:
        found = [parameter.grad for parameter in parameters.values()]
        _without_gradients(parameters.values())
        for parameter, gradient in earlier:
            parameter.grad = gradient
    moved: frozenset[int] = frozenset()
    # Hooks change gradients after the graph.
    if call.mover is not None and not any(map(post_accumulate_hooks, parameters.values())):
        by_id = dict(zip(map(id, parameters.values()), found, strict=True))
        moved = call.mover.move(value.detach(), by_id, _constrained(capture.trace))
        found = [None if key in moved else gradient for key, gradient in by_id.items()]
    # The tail-adaptive loss has gradients but no value.
    lost = (
        torch.isnan(value)
        if isinstance(call.loss, TraceTailAdaptive_ELBO)
        else ~torch.isfinite(value)
    )
    summary = None if terms is None else _summary(terms)
    return Evaluation(
        value if attached else value.detach(),
        _apart(found),
        parameters,
        lost.any().float(),
        terms,
        summary,
        hooked=not differentiable,
        moved=moved,
        attached=attached,
    )


def is_differentiable(loss: Any) -> bool:
    """Whether a loss, or a function in its place, returns a tensor to differentiate, and leaves compiling to others."""
    if not hasattr(loss, "loss_and_grads"):
        return True
    return (
        hasattr(loss, "differentiable_loss")
        and not isinstance(loss, JITTED)
        and not _has_own_gradients(loss)
    )


def _has_own_gradients(loss: Any) -> bool:
    """Return whether ``loss_and_grads`` is overridden, and ``differentiable_loss`` is not."""
    for names in (vars(loss), *map(vars, type(loss).__mro__)):
        if "differentiable_loss" in names or "loss_and_grads" in names:
            return "differentiable_loss" not in names
    return False


def has_terms(loss: Any) -> bool:
    """Return whether a loss is a ``TermsELBO`` that computes its value as that class does."""
    own = getattr(type(loss), "differentiable_loss", None)
    return (
        isinstance(loss, TermsELBO)
        and own is TermsELBO.differentiable_loss
        and not _has_own_gradients(loss)
    )


def _value(call: Call, differentiable: bool) -> tuple[Tensor, LossTerms | None]:
    """Return the loss as a tensor, and its terms, if it has any."""
    loss, model, guide, args, kwargs = call[:5]
    if has_terms(loss):
        with torch.set_grad_enabled(call.gradients):
            return loss.loss_and_terms(model, guide, args, kwargs, call.weight, call.step)
    if differentiable:
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
    """Return the numbers of a training's record."""
    each = terms if terms.num_data is None else terms.per_datum()
    return torch.stack([each.loss, each.negative_log_likelihood, each.kl]).detach()


def _without_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Take the gradients of parameters away; returns both. A loss that calls ``backward`` adds to what there is."""
    earlier = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in earlier:
        parameter.grad = None
    return earlier


def _apart(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients in memory of their own, so that each can be changed in place."""
    taken: set[int] = set()
    own: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout is torch.strided:
            storage = gradient.untyped_storage()
            alone = (
                gradient.is_contiguous()
                and len(storage) == gradient.nbytes
                and storage._cdata not in taken
            )
            gradient = gradient if alone else gradient.clone(memory_format=torch.contiguous_format)
            taken.add(gradient.untyped_storage()._cdata)
        own.append(gradient)
    return tuple(own)


def _trained(trace: Trace) -> dict[str, Tensor]:
    """Return the parameters in a trace, as Pyro's optimizers see them: each once, by its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, site in dict[str, Any](trace.nodes).items():
        value = site["value"]
        value = value.unconstrained() if hasattr(value, "unconstrained") else value
        if value.requires_grad:
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _leaves(value: Tensor) -> list[Tensor]:
    """Return the tensors that the gradient of a value goes to."""
    nodes: list[Any] = [value.grad_fn]
    seen = set(nodes)
    for node in nodes:
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        nodes.extend(new)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _constrained(trace: Trace) -> dict[int, Tensor]:
    """Return the values of constrained parameters, by the id of the unconstrained one."""
    values = [site["value"] for site in dict[str, Any](trace.nodes).values()]
    return {
        id(value.unconstrained()): value.detach()
        for value in values
        if hasattr(value, "unconstrained")
    }
