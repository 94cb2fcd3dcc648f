# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic variational inference with compiled steps."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.checks import optional, positive_count
from pyro_radial._pyro.types import Args, Guide, Kwargs, Model
from pyro_radial.infer.optim.joint import JointOptimizer, add_gradients, optimizer_parameters
from pyro_radial.infer.step.compiled_elbo import CompiledELBO, UsesGraphs, call_of
from pyro_radial.infer.step.inductor import Options
from pyro_radial.infer.step.lazy_loss import Loss, as_number
from pyro_radial.infer.step.loss_evaluation import Call
from pyro_radial.infer.step.not_finite import find_not_finite, not_finite_error
from pyro_radial.infer.step.recording import check_observations
from pyro_radial.infer.step.step import FiniteCheck, Step, take_step


class CompiledSVI(UsesGraphs):
    r"""Run the steps of :class:`pyro.infer.SVI` as compiled graphs.

    The first step with a signature runs the program once and records the tensor operations of its loss and gradients.
    Later steps replay them with fresh noise; after a thousand replays inductor compiles the graph. On a GPU it compiles
    it at once, and the whole step, with that of the optimizer, becomes one CUDA graph. A signature is the tree, shapes,
    strides, dtypes and devices of the arguments, and the values of arguments that are not tensors.

    Parameters, buffers and other tensors, the scale N / B and the weight of the KL are inputs of the graph. The first
    run also finds the Python state that the program reads: attributes, closures, globals, items of containers, hooks,
    ``requires_grad``, small tensors. Each step compares it; a change is recorded again. A program that changes such
    state itself, or reads the value of a parameter, a draw or an argument, as in ``if w > 0:``, runs as usual; a
    warning names the line. A graph does not see files, queues, the clock, or objects of C extensions that change
    inside. It checks observations against their supports, and no other arguments.

    :param model: a Pyro model, a module or a function.
    :param guide: its guide.
    :param optim: a Pyro optimizer or scheduler, a torch optimizer, a function from parameters to one, or
        :class:`~pyro_radial.infer.NaturalGradient`. One torch optimizer stands in for Pyro's; save its state through
        ``svi.optimizer``.
    :param loss: an ELBO, or a function of the model, the guide and their arguments. An ELBO without
        ``differentiable_loss``, such as ``RenyiELBO``, runs as usual.
    :param loss_and_grads: a function that adds the gradients, as in ``SVI``; it runs as usual.
    :param bool compile: whether to compile graphs or replay them as recorded, as without a C++ compiler.
    :param int max_signatures: the largest number of graphs; with other signatures or states the program runs as usual.
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
        elbo = CompiledELBO(loss, compile=compile, max_signatures=max_signatures, options=options)
        self.model = model
        self.guide = guide
        self.optim = optim
        self.loss = loss
        self._loss_and_grads = loss_and_grads
        self.graphs = elbo.graphs
        # The optimizer of all parameters, and the ``optim`` that it was made from, which a user may replace.
        self._joint = JointOptimizer(optim)
        self._joint_optim = optim
        self._check = FiniteCheck(
            optional(positive_count, "check_every", check_every), self._not_finite_error
        )
        self._steps = 0

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer of all parameters; None before the first step, which finds them.

        To load a state before the first step, give ``optim`` a torch optimizer, as the page on saving does.
        """
        return self._joint.optimizer

    def step(self, *args: Any, **kwargs: Any) -> Loss:
        """Take a gradient step.

        :param args: arguments of the model and the guide.
        :returns: the loss before the step, a float, or a tuple of them where ``SVI`` returns a tuple. On a GPU it is a
            number that becomes a float when it is looked at, because looking waits for the device.
        """
        if self.optim is not self._joint_optim:
            self._joint.forget_gradients()
            self._joint = JointOptimizer(self.optim)
            self._joint_optim = self.optim
        self._joint.start(self.model, self.guide, args, kwargs)
        call = self._make_call(self.model, self.guide, args, kwargs)
        if call.gradients:
            call = call._replace(optimizer=self._joint.optimizer, stopped=self._check.stopped)
        (self._latest,) = take_step([call], self.graphs, self._check, self._joint)
        self._steps += 1
        return as_number(self._latest.loss)

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss, as :meth:`step` returns it, without a step."""
        call = self._make_call(self.model, self.guide, args, kwargs)
        return as_number(self._evaluate(call._replace(gradients=False)).loss)

    def loss_and_grads(self, model: Model, guide: Guide, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss and add its gradients to those of the parameters, for a loop of your own.

        The loss is not checked, and no step is taken. Call the optimizer's ``step`` and ``zero_grad`` yourself.
        """
        evaluation = self._evaluate(self._make_call(model, guide, args, kwargs))
        add_gradients(evaluation.parameters_with_gradients())
        return as_number(evaluation.loss)

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

    def _not_finite_error(self, steps: Sequence[Step]) -> FloatingPointError:
        """Return the error for the first of these steps with a loss that was not finite, found by repeating them."""
        parameters = {} if self._latest is None else self._latest.parameters
        for number, step in enumerate(steps, self._steps + 1 - len(steps)):
            if names := _find_not_finite_in_step(step, parameters):
                return not_finite_error(names, number)
        return not_finite_error(["the loss"], self._steps)


def _find_not_finite_in_step(step: Step, parameters: Mapping[str, Tensor]) -> list[str]:
    """Repeat a step, and return in words what is not finite; raise an error for an observation out of its support."""
    with torch.random.fork_rng():
        for call in step.calls:
            step.noise.restore()
            check_observations(call.model, call.guide, call.args, call.kwargs)
            step.noise.restore()
            if names := find_not_finite(
                call.loss, call.model, call.guide, call.args, call.kwargs, parameters
            ):
                return names
    return []
