# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Pyro program, and the gradients of its compiled step against those of its eager step."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_radial import TermsELBO
from pyro_radial.infer.compiler.cache import Graphs
from pyro_radial.infer.step.evaluation import Call, LossEvaluation
from pyro_radial.infer.step.stepper import keep_terms


class Program(NamedTuple):
    """A model, its guide, a loss, and what they are called with."""

    model: Any
    guide: Any
    loss: ELBO
    args: tuple[Any, ...] = ()


class Errors(NamedTuple):
    """The loss, and the errors of its gradients relative to the eager ones: the worst, and of all together."""

    loss: float
    worst: float
    together: float


def evaluated(program: Program, graphs: Graphs, *, gradients: bool = True) -> LossEvaluation:
    """The loss of a program by graphs, with its gradients."""
    loss = program.loss
    call = Call(loss, program.model, program.guide, program.args, {}, gradients)
    if isinstance(loss, TermsELBO):
        call = call._replace(weight=loss.weight_at(loss.step), step=loss.step + 1)
    evaluation = graphs(call)
    keep_terms(call, evaluation)
    return evaluation


def compared(program: Program, graphs: Graphs, seed: int = 3, before: Callable[[], Any] = lambda: None) -> Errors:
    """Compare the gradients with those of Pyro's ``SVI`` on the same noise.

    :param before: is called before each of the two.
    """
    before()
    # A loss that calls backward itself would add to what an earlier step has left.
    for parameter in dict(pyro.get_param_store().named_parameters()).values():
        parameter.grad = None
    with kept(program.model, program.loss):
        pyro.set_rng_seed(seed)
        evaluation = evaluated(program, graphs)
    pairs = evaluation.parameters_with_gradients()
    parameters = [parameter for parameter, _ in pairs]
    before()
    pyro.set_rng_seed(seed)
    gradients = eager_gradients(program, parameters)
    errors = [float((found - true).norm()) for (_, found), true in zip(pairs, gradients, strict=True)]
    norms = [float(true.norm()) for true in gradients]
    worst = max(error / norm if error else 0.0 for error, norm in zip(errors, norms, strict=True))
    return Errors(float(evaluation.loss.sum()), worst, math.hypot(*errors) / math.hypot(*norms))


def eager_gradients(program: Program, parameters: list[Tensor]) -> list[Tensor]:
    """The gradients that the loss itself leaves at its parameters."""
    for parameter in parameters:
        parameter.grad = None
    program.loss.loss_and_grads(program.model, program.guide, *program.args)
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@contextmanager
def kept(model: Any, loss: ELBO) -> Iterator[None]:
    """Restore buffers, the step of the loss and the values in Pyro's store, such as running baselines."""
    step = getattr(loss, "step", None)
    store = dict(pyro.get_param_store().named_parameters())
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    tensors = [*buffers.values(), *store.values()]
    values = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        if step is not None:
            loss.step = step
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        # A loss may put another tensor in its place.
        for name, tensor in store.items():
            if pyro.get_param_store().get_state()["params"][name] is not tensor:
                pyro.get_param_store()[name] = tensor
