# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An ELBO whose values and gradients come from compiled graphs, for loops of any kind."""

from typing import Any

import torch
from pyro.infer.elbo import ELBOModule
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.types import Args, Guide, Kwargs, Model
from pyro_radial.infer.optim.joint import add_gradients
from pyro_radial.infer.step.inductor import Options
from pyro_radial.infer.step.lazy_loss import Loss, as_number
from pyro_radial.infer.step.loss_evaluation import (
    AS_IT_IS,
    Call,
    LossEvaluation,
    has_terms,
    scale_gradients,
)
from pyro_radial.infer.step.loss_graphs import Graphs
from pyro_radial.infer.step.step import keep_terms


class UsesGraphs:
    """What :class:`CompiledELBO` and :class:`~pyro_radial.CompiledSVI` tell about their graphs."""

    #: Evaluates losses by graphs.
    graphs: Graphs
    _latest: LossEvaluation | None = None

    @property
    def compiled(self) -> bool:
        """Whether the latest step or evaluation replayed a graph."""
        return self._latest is not None and self._latest.mode != AS_IT_IS

    @property
    def num_graphs(self) -> int:
        """The number of graphs so far."""
        return len(self.graphs.recordings)

    @property
    def eager_reasons(self) -> list[str]:
        """The reasons why programs ran as usual, or why only a part of a step is a CUDA graph; empty without any."""
        return [*self.graphs.eager_reasons, *self.graphs.uncaptured_reasons]

    def _evaluate(self, call: Call) -> LossEvaluation:
        """Evaluate a call by graphs, and store its terms in the loss."""
        self._latest = self.graphs(call)
        keep_terms(call, self._latest)
        return self._latest


class CompiledELBO(UsesGraphs):
    r"""Evaluate an ELBO as a compiled graph, in a training loop of your own.

    It has the interface of Pyro's ELBOs: ``elbo.differentiable_loss(model, guide, *args)``, ``elbo.loss_and_grads``,
    ``elbo.loss``, and ``elbo(model, guide)`` is a module with the parameters of both. See
    :class:`~pyro_radial.CompiledSVI`, which adds an optimizer, for what can be compiled. As it has no
    optimizer, its graphs are not captured as CUDA graphs.

    :param loss: an ELBO, or a function of the model, the guide and their arguments.
    :param bool compile: whether to compile graphs or replay them as recorded, as without a C++ compiler.
    :param int max_signatures: the largest number of graphs; with other signatures or states the program runs as usual.
    :param options: settings of inductor, such as ``{"max_autotune": True}``.
    :raises ValueError: for a loss that does not fit.

    Example::

        >>> from pyro.infer import TraceMeanField_ELBO
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(32, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(num_data=32))
        >>> guide = AutoRadial(model)
        >>> guide.setup(x, x[:, :1])
        >>> loss = CompiledELBO(TraceMeanField_ELBO(), compile=False)(model, guide)
        >>> optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss(x, x[:, :1]).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        loss: Any,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        options: Options | None = None,
    ) -> None:
        if isinstance(loss, type) or not callable(loss):
            raise ValueError(
                "loss must be an ELBO, such as TraceMeanField_ELBO() or TermsELBO(), or a function of the model, the "
                f"guide and their arguments, got {type(loss).__name__}"
            )
        max_signatures = positive_count("max_signatures", max_signatures)
        self.compiled_loss = loss
        self.graphs = Graphs(compile=compile, max_signatures=max_signatures, options=options)

    def __call__(self, model: nn.Module, guide: nn.Module) -> ELBOModule:
        """Make a module with the parameters of a model and a guide; calling it gives the differentiable loss."""
        return ELBOModule(model, guide, self)  # type: ignore[arg-type]

    def loss(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss without gradients."""
        call = call_of(self.compiled_loss, model, guide, args, kwargs)
        return as_number(self._evaluate(call._replace(gradients=False)).loss)

    def loss_and_grads(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss and add its gradients to those of the parameters. The loss is not checked."""
        evaluation = self._evaluate(call_of(self.compiled_loss, model, guide, args, kwargs))
        add_gradients(evaluation.parameters_with_gradients())
        return as_number(evaluation.loss)

    def differentiable_loss(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Tensor:
        """Estimate the loss as a tensor with a gradient. The loss is not checked."""
        call = call_of(self.compiled_loss, model, guide, args, kwargs)
        evaluation = self._evaluate(call._replace(attached=True))
        if evaluation.attached or not call.gradients:
            return evaluation.loss
        parameters = evaluation.parameters.values()
        return _WithGradients.apply(evaluation.loss, evaluation.gradients, *parameters)


def call_of(loss: Any, model: Model, guide: Guide, args: Args, kwargs: Kwargs) -> Call:
    """Return the call that evaluates a loss; without gradients under ``torch.no_grad``, as in ``SVI``."""
    call = Call(loss, model, guide, args, kwargs, gradients=torch.is_grad_enabled())
    if not has_terms(loss):
        return call
    return call._replace(weight=loss.weight_at(loss.step), step=loss.step + 1)


class _WithGradients(torch.autograd.Function):
    """Attach gradients that are computed already to a loss, for ``backward``."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Any, *parameters: Tensor) -> Tensor:
        """Return the loss, and keep the gradients of the parameters for ``backward``."""
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> Any:
        """Return the gradients, scaled by the gradient of the loss."""
        return None, None, *scale_gradients(ctx.gradients, by_loss)
