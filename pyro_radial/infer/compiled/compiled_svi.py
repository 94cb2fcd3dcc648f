# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Stochastic variational inference whose step is one compiled graph."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from torch import Tensor
from torch.optim import Optimizer

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.compat import stop_where
from pyro_radial._pyro.random_state import TorchNoise
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.infer.training.culprits import culprits
from pyro_radial.infer.training.optimizers import JointOptimizer

__all__ = ["CompiledSVI"]


class _Step(NamedTuple):
    """What a step was taken on."""

    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    noise: TorchNoise


class CompiledSVI:
    r"""The interface of :class:`pyro.infer.SVI`, at a small multiple of the time of a plain network's step.

    The first call runs the Pyro program as it is, records the tensor operations of its loss and gradients as one graph,
    and replays that with fresh noise; a graph in frequent use is compiled by inductor. What it computes is what the
    program computes: parameters, buffers, chained priors, the scale N / B of a mini-batch and the weight of the KL are
    inputs of the graph, so that what changes in place, or is replaced by its like, is seen. Any guide and any loss of
    Pyro's with ``differentiable_loss`` will do, particles looped or vectorized, plates with subsampling, ``pyro.param``
    in the model, batch norm in train mode.

    A graph serves one signature: the tree, shapes, strides, dtypes and devices of the tensors among the arguments, the
    values of the other arguments, and the structure and plain attributes of the modules, such as train or eval mode or
    ``num_data``. Another signature is recorded anew, which takes a second or two, and shares compiled code with a graph
    like it: a new guide of the model, the next task of a :class:`~pyro_radial.PriorChain` or another ``num_data``
    compile nothing. Two things a graph cannot see: a Python variable that is neither an argument nor an attribute of a
    module, and a tensor that such a variable is set to, where a change in place would be seen. Modules are found in
    models and guides that are modules, and in the closures and globals of those that are functions.

    A program that is no graph runs as it is at each step, and a warning says why, once: Python code that reads a value
    (``if w > 0:``, ``float(w)``) with its line, random numbers of Python or NumPy, arguments that hide tensors in other
    objects, handlers around the call. Without a C++ compiler on the machine graphs are replayed as recorded.

    Its speed, beside that of a plain network and of other libraries, is in ``benchmarks/RESULTS.md``.

    :param model: a Pyro model, a module or a function.
    :param guide: its guide.
    :param optim: a Pyro optimizer or scheduler; a torch optimizer; or a function from parameters to one. Of Pyro's, one
        torch optimizer is made for all parameters, with groups where their settings differ, and its fused step where
        torch has one. ``optim.get_state()`` and ``save`` are as with ``SVI``, also to go on from one to the other.
    :param ELBO loss: ``TraceMeanField_ELBO``, ``Trace_ELBO``, :class:`~pyro_radial.RadialELBO`,
        :class:`~pyro_radial.FunctionalELBO`, or another with ``differentiable_loss``.
    :param bool compile: whether to compile graphs, or replay them as recorded.
    :param int max_signatures: the most signatures there may be.
    :param int check_every: after how many steps the loss is looked at, if it is NaN or infinite: by default after each
        on a CPU, and after 10 elsewhere, so that most have no host-device synchronization. No step is taken on such a
        loss, nor after it, where the optimizer is fused; with others it is looked at after each step.
    :param options: settings of inductor, such as ``{"triton.cudagraphs": True}``.
    :raises ValueError: for a loss or an optimizer that does not fit; from a step, for a signature too many; whatever
        model and guide raise.
    :raises FloatingPointError: from a step, naming the parameter, draw or site, when the loss is not finite.

    Example::

        >>> import pyro
        >>> from pyro.infer import TraceMeanField_ELBO
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, CompiledSVI, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> x = torch.randn(32, 2)
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(num_data=32))
        >>> svi = CompiledSVI(model, AutoRadial(model), pyro.optim.Adam({"lr": 0.01}), TraceMeanField_ELBO(),
        ...                   compile=False)
        >>> losses = [svi.step(x, x.sum(-1, keepdim=True)) for _ in range(100)]
        >>> losses[0].shape, bool(losses[-1] < losses[0])
        (torch.Size([]), True)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        optim: PyroOptim | Optimizer | Callable[[list[Tensor]], Optimizer],
        loss: ELBO,
        *,
        compile: bool = True,
        max_signatures: int = 8,
        check_every: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not hasattr(loss, "differentiable_loss"):
            raise ValueError(
                "CompiledSVI: loss must be an ELBO with differentiable_loss, such as TraceMeanField_ELBO() or "
                f"RadialELBO(), got {type(loss).__name__}"
            )
        max_signatures = positive_count("CompiledSVI: max_signatures", max_signatures)
        self.model, self.guide, self.optim, self.loss = model, guide, optim, loss
        self.check_every = None if check_every is None else positive_count("CompiledSVI: check_every", check_every)
        #: What it replays: its graphs, and why there are none, in ``eager_because``.
        self.captured = CapturedLoss(
            model, guide, loss, compile=compile, max_signatures=max_signatures, options=options
        )
        self._joint = JointOptimizer(optim, "CompiledSVI")
        self._steps = 0
        self._unchecked: list[_Step] = []
        self._stopped: Tensor | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer of all parameters; None before the first step, which finds them."""
        return self._joint.optimizer

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Take a gradient step.

        :param args: of the model and the guide.
        :returns: the loss before the step, a 0-d tensor, without a host-device synchronization.
        """
        self._joint.forget_gradients()
        noise = TorchNoise.now()
        loss, gradients = self.captured(args, kwargs)
        self._joint.adopt(self.captured.parameters)
        self._unchecked.append(_Step(self._steps, args, kwargs, noise))
        self._check(loss)
        self._joint.step(gradients)
        self._steps += 1
        return loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """An estimate of the loss, without a step.

        :returns: a 0-d tensor.
        """
        return self.captured(args, kwargs, gradients=False)[0]

    def _check(self, loss: Tensor) -> None:
        """Look at the loss when it is time; until then let the optimizer stand still once it is not finite."""
        every = self.check_every or (1 if loss.device.type == "cpu" else 10)
        optimizer = self._joint.optimizer
        broken = ~torch.isfinite(loss)
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
        """The error for the first step whose loss was not finite, which names what was not."""
        found: list[str] = []
        where = self._steps
        for step in self._unchecked:
            where = step.number
            with torch.random.fork_rng():
                step.noise.restore()
                found = culprits(self.loss, self.model, self.guide, step.args, step.kwargs, self.captured.parameters)
            if found:
                break
        self._unchecked.clear()
        self._stopped = None
        if self._joint.optimizer is not None:
            stop_where(self._joint.optimizer, None)
        return FloatingPointError(
            f"CompiledSVI: not finite in step {where}: {', '.join(found) or 'the loss'}; no step was taken on it; try "
            "a smaller learning rate"
        )
