# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic variational inference with compiled steps."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.checks import check_flag, check_types, optional, positive_count
from pyro_radial._pyro.compat import stop_where
from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.infer.compiled.recording import check_observations
from pyro_radial.infer.training.natural_gradient import NaturalGradientOptimizer
from pyro_radial.infer.training.not_finite import not_finite_parts
from pyro_radial.infer.training.optimizers import JointOptimizer

__all__ = ["CompiledSVI"]

Loss = Tensor | tuple[Tensor, ...]


class CompiledSVI:
    r"""Run the steps of :class:`pyro.infer.SVI` as compiled graphs.

    The first step with a signature runs the program once and records the tensor operations of its loss and gradients.
    Later steps replay them with fresh noise; after a thousand replays inductor compiles the graph. A signature is the
    tree, shapes, strides, dtypes and devices of the arguments, and the values of arguments that are not tensors.

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
        the device; 1 on a CPU and 10 elsewhere by default. No step is taken on such a loss.
    :param options: settings of inductor, such as ``{"triton.cudagraphs": True}``.
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
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: PyroOptim | Optimizer | Callable[[list[Tensor]], Optimizer],
        loss: Any,
        loss_and_grads: Callable[..., Any] | None = None,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        check_every: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_types(Callable, model=model, guide=guide)
        check_flag("compile", compile)
        check_types(Mapping | None, options=options)
        check_types(Callable | None, loss_and_grads=loss_and_grads)
        if isinstance(loss, type) or not callable(loss):
            raise ValueError(
                "loss must be an ELBO, such as TraceMeanField_ELBO() or TermsELBO(), or a function of the model, the "
                f"guide and their arguments, got {type(loss).__name__}"
            )
        max_signatures = positive_count("max_signatures", max_signatures)
        self.model, self.guide, self.optim, self.loss = model, guide, optim, loss
        self.check_every = optional(positive_count, "check_every", check_every)
        self._loss_and_grads = loss_and_grads
        #: The graphs.
        self.captured = CapturedLoss(
            model, guide, loss, compile=compile, max_signatures=max_signatures, options=options
        )
        self._joint, self._joint_of = JointOptimizer(optim), optim
        self._steps = 0
        # The arguments and the noise of the latest steps, to repeat them.
        self._unchecked: list[tuple[TorchNoise, Any, Any]] = []
        self._stopped: Tensor | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer of all parameters; None before the first step, which finds them."""
        return self._joint.optimizer

    @property
    def compiled(self) -> bool:
        """Whether the latest step or evaluation replayed a graph."""
        return self.captured.replayed

    @property
    def num_graphs(self) -> int:
        """The number of graphs so far."""
        return len(self.captured.recordings)

    @property
    def eager_because(self) -> list[str]:
        """Why steps ran as usual; empty if all replayed a graph."""
        return self.captured.eager_because

    def step(self, *args: Any, **kwargs: Any) -> Loss:
        """Take a gradient step.

        :param args: arguments of the model and the guide.
        :returns: the loss before the step, a 0-d tensor, or a tuple of them where ``SVI`` returns a tuple.
        """
        if self.optim is not self._joint_of:
            self._joint, self._joint_of = JointOptimizer(self.optim), self.optim
        self._joint.start(self.model, self.guide, args, kwargs, self.captured.compile)
        self._joint.forget_gradients()
        noise = TorchNoise.now()
        optimizer = self._joint.optimizer
        update = optimizer.in_graph() if isinstance(optimizer, NaturalGradientOptimizer) else None
        loss, gradients = self._evaluate(self.model, self.guide, args, kwargs, update=update)
        self._joint.adopt(self.captured.parameters)
        self._unchecked.append((noise, args, kwargs))
        self._check(loss)
        self._joint.step(gradients)
        self._steps += 1
        return loss.unbind() if loss.ndim else loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss, as :meth:`step` returns it, without a step."""
        loss, _ = self._evaluate(self.model, self.guide, args, kwargs, gradients=False)
        return loss.unbind() if loss.ndim else loss

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Loss:
        """Estimate the loss and add its gradients to those of the parameters, for a loop of your own.

        The loss is not checked, and no step is taken. Call the optimizer's ``step`` and ``zero_grad`` yourself.
        """
        loss, gradients = self._evaluate(model, guide, args, kwargs)
        for parameter, gradient in gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss.unbind() if loss.ndim else loss

    def _evaluate(
        self, model: Any, guide: Any, args: Any, kwargs: Any, **how: Any
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The loss and its gradients, for the present loss."""
        captured = self.captured
        captured.model, captured.guide, captured.loss = model, guide, self.loss
        if self._loss_and_grads is not None:
            captured.loss = SimpleNamespace(loss=self.loss, loss_and_grads=self._loss_and_grads)
        return captured(args, kwargs, **how)

    def _check(self, loss: Tensor) -> None:
        """Check the loss if it is time to; until then let the optimizer do nothing after a loss that is not finite."""
        every = self.check_every or (1 if loss.device.type == "cpu" else 10)
        optimizer = self._joint.optimizer
        broken = ~torch.isfinite(loss).all()
        if every > 1 and optimizer is not None:
            self._stopped = broken.float() if self._stopped is None else torch.maximum(self._stopped, broken.float())
            broken = self._stopped
            every = every if stop_where(optimizer, self._stopped) else 1
        if len(self._unchecked) < every:
            return
        if bool(broken):
            raise self._not_finite()
        self._unchecked.clear()

    def _not_finite(self) -> FloatingPointError:
        """The error for the first step with a loss that was not finite, found by repeating the steps."""
        steps, self._unchecked, self._stopped = self._unchecked, [], None
        if self._joint.optimizer is not None:
            stop_where(self._joint.optimizer, None)
        named = ((number, self._parts(*step)) for number, step in enumerate(steps, self._steps + 1 - len(steps)))
        where, found = next(((number, parts) for number, parts in named if parts), (self._steps, ["the loss"]))
        return FloatingPointError(
            f"not finite in step {where}: {', '.join(found)}; no step was taken on it; try a smaller learning rate"
        )

    def _parts(self, noise: TorchNoise, args: Any, kwargs: Any) -> list[str]:
        """What is not finite in a step, by name."""
        with torch.random.fork_rng():
            noise.restore()
            check_observations(self.model, self.guide, args, kwargs)
            noise.restore()
            return not_finite_parts(self.loss, self.model, self.guide, args, kwargs, self.captured.parameters)
