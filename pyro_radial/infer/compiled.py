# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Losses, and steps of stochastic variational inference, from compiled graphs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from pyro.infer.elbo import ELBOModule
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm.auto import trange

from pyro_radial._pyro.checks import optional, positive_count
from pyro_radial._pyro.types import Args, Guide, Kwargs, Model
from pyro_radial.infer.compiler.cache import Graphs
from pyro_radial.infer.compiler.inductor import Options
from pyro_radial.infer.loss.lazy_loss import Loss, as_number
from pyro_radial.infer.step.evaluation import (
    Call,
    LossEvaluation,
    Mode,
    has_terms,
    keep_terms,
)
from pyro_radial.infer.step.optimizer import JointOptimizer, add_gradients, optimizer_parameters
from pyro_radial.infer.step.stepper import Stepper


class CompiledELBO:
    r"""Evaluate an ELBO as a compiled graph, in a training loop of your own.

    It has the interface of Pyro's ELBOs: ``elbo.differentiable_loss(model, guide, *args)``, ``elbo.loss_and_grads``,
    ``elbo.loss``, and ``elbo(model, guide)`` is a module with the parameters of both. See
    :class:`~pyro_radial.CompiledSVI`, which adds an optimizer, for what can be compiled. As it has no
    optimizer, its graphs are not captured as CUDA graphs.

    :param loss: an ELBO, or a function of the model, the guide and their arguments.
    :param bool compile: whether to compile graphs or replay them as recorded, as without a C++ compiler.
    :param int max_signatures: the largest number of graphs. A new one replaces the one that was not used for longest,
        as long as recording takes less than a tenth of the time; then the program runs as usual.
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
        self.loss_to_compile = loss
        #: Evaluates losses by graphs.
        self.graphs = Graphs(compile=compile, max_signatures=max_signatures, options=options)
        self._latest: LossEvaluation | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the latest evaluation; a copy records its own graphs too."""
        return {**self.__dict__, "_latest": None}

    def __call__(self, model: nn.Module, guide: nn.Module) -> ELBOModule:
        """Make a module with the parameters of a model and a guide; calling it gives the differentiable loss."""
        return ELBOModule(model, guide, self)  # type: ignore[arg-type]

    @property
    def compiled(self) -> bool:
        """Whether the latest step or evaluation replayed a graph."""
        return self._latest is not None and self._latest.mode != Mode.AS_IT_IS

    @property
    def num_graphs(self) -> int:
        """The number of graphs so far."""
        return len(self.graphs.programs)

    @property
    def eager_reasons(self) -> list[str]:
        """The reasons why programs ran as usual, graphs uncompiled, or steps in part outside of a CUDA graph."""
        return [*self.graphs.eager_reasons, *self.graphs.fallback_reasons]

    def loss(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss without gradients."""
        call = self._make_call(model, guide, args, kwargs)
        return as_number(self._evaluate(call._replace(gradients=False)).loss)

    def loss_and_grads(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss and add its gradients to those of the parameters, for a loop of your own.

        The loss is not checked, and no step is taken. Call the optimizer's ``step`` and ``zero_grad`` yourself.
        """
        evaluation = self._evaluate(self._make_call(model, guide, args, kwargs))
        add_gradients(evaluation.parameters_with_gradients())
        return as_number(evaluation.loss)

    def differentiable_loss(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Tensor:
        """Estimate the loss as a tensor with a gradient. The loss is not checked."""
        call = self._make_call(model, guide, args, kwargs)
        evaluation = self._evaluate(call._replace(attached=True))
        if evaluation.attached or not call.gradients:
            return evaluation.loss
        parameters = evaluation.parameters.values()
        return _WithGradients.apply(evaluation.loss, evaluation.gradients, *parameters)

    def _make_call(self, model: Model, guide: Guide, args: Args, kwargs: Kwargs) -> Call:
        """Return the call that evaluates the loss."""
        return call_of(self.loss_to_compile, model, guide, args, kwargs)

    def _evaluate(self, call: Call) -> LossEvaluation:
        """Evaluate a call by graphs, and store its terms in the loss."""
        self._latest = keep_terms(call, self.graphs(call))
        return self._latest


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> Any:
        """Return the gradients, scaled by the gradient of the loss."""
        scaled = (None if gradient is None else gradient * by_loss for gradient in ctx.gradients)
        return None, None, *scaled


class CompiledSVI(CompiledELBO):
    r"""Run the steps of :class:`pyro.infer.SVI` as compiled graphs.

    The first step with a signature runs the program once and records the tensor operations of its loss and gradients.
    Later steps replay them with fresh noise, while a second process compiles the graph by inductor; its code stays on
    disk. On a GPU the first step compiles it, and the whole step, with that of the optimizer, becomes one CUDA graph. A
    signature is the tree, shapes, strides, dtypes and devices of the arguments, and the values of other arguments.

    Parameters, buffers and other tensors, the scale N / B and the weight of the KL are inputs of the graph. The first
    run also finds the Python state that the program reads: attributes, closures, globals, items of containers, hooks,
    ``requires_grad``, small tensors. Each step compares it; a change is recorded again. A program that changes such
    state itself, or reads the value of a parameter, a draw or an argument, as in ``if w > 0:``, runs as usual; a
    warning names the line. A graph does not see files, queues, the clock, or objects of C extensions that change
    inside. It checks observations against their supports, and no other arguments.

    :param model: a Pyro model, a module or a function.
    :param guide: its guide.
    :param optim: a Pyro optimizer or scheduler, a torch optimizer, or a function from parameters to one. One torch
        optimizer stands in for Pyro's; save its state through ``svi.optimizer``.
    :param loss: an ELBO, or a function of the model, the guide and their arguments. An ELBO without
        ``differentiable_loss``, such as ``RenyiELBO``, runs as usual.
    :param loss_and_grads: a function that adds the gradients, as in ``SVI``; it runs as usual.
    :param bool compile: whether to compile graphs or replay them as recorded, as without a C++ compiler.
    :param int max_signatures: the largest number of graphs. A new one replaces the one that was not used for longest,
        as long as recording takes less than a tenth of the time; then the program runs as usual.
    :param int check_every: how many steps pass between checks for a loss that is not finite, which synchronize with
        the device; 1 on a CPU and 50 elsewhere by default. No step is taken on such a loss, nor on those after it.
    :param options: settings of inductor, such as ``{"max_autotune": True}``.
    :raises ValueError: for a loss or an optimizer that does not fit; from a step, for an observation outside of its
        support.
    :raises FloatingPointError: from a step, naming the parameter, draw or site, if the loss is not finite.

    Example::

        >>> import pyro
        >>> from pyro.infer import TraceMeanField_ELBO
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(32, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(num_data=32))
        >>> svi = CompiledSVI(model, AutoRadial(model), pyro.optim.Adam({"lr": 0.01}), TraceMeanField_ELBO(),
        ...                   compile=False)
        >>> losses = [svi.step(x, x.sum(-1, keepdim=True)) for _ in range(100)]
        >>> bool(losses[-1] < losses[0])
        True
    """

    def __init__(
        self,
        model: Model,
        guide: Guide,
        optim: PyroOptim | Optimizer | Callable[[list[Tensor]], Optimizer],
        loss: Any,
        loss_and_grads: Callable[..., Any] | None = None,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        check_every: int | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(loss, compile=compile, max_signatures=max_signatures, options=options)
        self.model = model
        self.guide = guide
        self.optim = optim
        #: The loss, which a user may replace, as in ``SVI``.
        self.loss: Any = loss
        self._loss_and_grads = loss_and_grads
        self._stepper = Stepper(
            self.graphs, JointOptimizer(optim), optional(positive_count, "check_every", check_every)
        )
        self._num_steps = 0
        # The ``optim`` of the stepper's optimizer, since a user may replace it.
        self._optim_in_use = optim

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer of all parameters; None before the first step, which finds them.

        To load a state before the first step, give ``optim`` a torch optimizer, as the page on saving does.
        """
        return self._stepper.optimizer.optimizer

    def step(self, *args: Any, **kwargs: Any) -> Loss:
        """Take a gradient step.

        :param args: arguments of the model and the guide.
        :returns: the loss before the step, a float, or a tuple of them where ``SVI`` returns a tuple. On a GPU it is a
            number that becomes a float when it is looked at, because looking waits for the device.
        """
        return as_number(self._take_step(args, kwargs))

    def run(self, steps: int, *args: Any, progress: bool = False, **kwargs: Any) -> Tensor:
        """Take several gradient steps on the same arguments, with the checks and errors of :meth:`step`.

        :param steps: the number of steps.
        :param args: arguments of the model and the guide.
        :param progress: whether to show a bar.
        :returns: the loss before each step, of shape ``[steps]``, on the device of the loss; ``[steps, n]`` where
            ``SVI`` returns a tuple of n numbers.
        :raises ValueError: if ``steps`` is not a positive integer.

        Example::

            >>> import pyro
            >>> from pyro.infer import Trace_ELBO
            >>> from pyro.infer.autoguide import AutoNormal
            >>> def model():
            ...     pyro.sample("w", pyro.distributions.Normal(3.0, 1.0))
            >>> svi = CompiledSVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO(), compile=False)
            >>> svi.run(20).shape
            torch.Size([20])
        """
        steps = positive_count("steps", steps)
        losses: list[Tensor] = []
        for _ in trange(steps, desc="run", unit="step", disable=not progress):
            losses.append(self._take_step(args, kwargs))
        self._stepper.look()
        return torch.stack(losses)

    def _take_step(self, args: Args, kwargs: Kwargs) -> Tensor:
        """Take a step, and return the loss before it."""
        stepper = self._stepper
        if self.optim is not self._optim_in_use:
            stepper.replace_optimizer(JointOptimizer(self.optim))
            self._optim_in_use = self.optim
        call = self._make_call(self.model, self.guide, args, kwargs)
        if call.gradients:
            call = call._replace(
                optimizer=self.optimizer,
                eager_optimizer_reason=stepper.optimizer.eager_reason,
                stopped=stepper.stopped,
            )
        (self._latest,) = stepper.step([call], self._num_steps)
        self._num_steps += 1
        return self._latest.loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss, as :meth:`step` returns it, without a step."""
        call = self._make_call(self.model, self.guide, args, kwargs)
        return as_number(self._evaluate(call._replace(gradients=False)).loss)

    def _make_call(self, model: Model, guide: Guide, args: Args, kwargs: Kwargs) -> Call:
        """Return the call that evaluates the current loss.

        The parameters of a torch optimizer are extra parameters, named by numbers, because a ``param`` statement may
        not have them.
        """
        loss = self.loss
        if self._loss_and_grads is not None:
            loss = SimpleNamespace(loss=self.loss, loss_and_grads=self._loss_and_grads)
        call = call_of(loss, model, guide, args, kwargs)
        if not isinstance(self.optim, Optimizer):
            return call
        trained = optimizer_parameters(self.optim)
        return call._replace(
            extra_parameters={str(n): parameter for n, parameter in enumerate(trained)}
        )
