# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training that goes on where it was each time that data have come in."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.optim import Adam

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.random_state import TorchNoise
from pyro_radial._pyro.state import load_states, states
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.training.culprits import culprits
from pyro_radial.infer.training.data import device_of, dtype_of
from pyro_radial.infer.training.not_finite import unwarned
from pyro_radial.infer.training.optimizers import JointOptimizer, fused_optimizer, stored_names
from pyro_radial.infer.training.trained import Trained
from pyro_radial.nn.likelihood import set_num_data

__all__ = ["Refits"]

DEFAULT_OPTIM: Any = partial(fused_optimizer, Adam, {"lr": 3e-3})


class Refits:
    """A model and a guide that are trained on by some gradient steps with each call, warm from the last.

    Batches have one size and the scale N / B of the likelihood is a tensor, so that one graph serves however many rows
    there are: it is recorded once, where a call of :func:`~pyro_radial.fit` for each number of rows would record it
    anew. A batch larger than the data holds rows more than once, all about as often.

    :param model: a Pyro model ``model(x, y)`` whose observations are in a plate of their number, such as a
        :class:`~pyro_radial.SupervisedModel` of a likelihood without ``num_data``.
    :param nn.Module guide: its guide.
    :param loss: as of :func:`~pyro_radial.fit`; :class:`~pyro_radial.RadialELBO` by default.
    :param optim: as there; Adam at 3e-3 by default. Its state is kept from call to call.
    :param int steps: gradient steps of a call.
    :param int batch_size: rows of a step, B.
    :param bool compile: whether the graph is compiled, or replayed as it was recorded.
    :param str who: what errors call it.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(scale=0.1))
        >>> refits = Refits(model, AutoRadial(model), steps=50, batch_size=8, compile=False)
        >>> x = torch.randn(12, 2)
        >>> refits.begin(x[:2], x[:2].sum(1, keepdim=True))
        >>> for rows in (4, 8, 12):
        ...     refits.refit(x[:rows], x[:rows].sum(1, keepdim=True))
        >>> refits.steps_done
        150
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        *,
        loss: ELBO | None = None,
        optim: Any = DEFAULT_OPTIM,
        steps: int = 200,
        batch_size: int = 64,
        compile: bool = True,
        who: str = "Refits",
    ) -> None:
        for name, module in (("model", model), ("guide", guide)):
            if not isinstance(module, nn.Module):
                raise ValueError(f"{who}: {name} must be an nn.Module, got {type(module).__name__}")
        self.model, self.guide, self.who = model, guide, who
        self.loss = RadialELBO() if loss is None else loss
        if not hasattr(self.loss, "differentiable_loss"):
            raise ValueError(f"{who}: loss must be an ELBO with differentiable_loss, got {type(loss).__name__}")
        self.optim, self.compile = optim, compile
        self.steps = positive_count(f"{who}: steps", steps)
        self.batch_size = positive_count(f"{who}: batch_size", batch_size)
        self._steps_done = 0
        self._joint = JointOptimizer(optim, who)
        self._weighted = _Weighted(model)
        self._captured = CapturedLoss(self._weighted, guide, self.loss, compile=compile)
        self._trained: Trained | None = None

    @property
    def steps_done(self) -> int:
        """Gradient steps taken in all."""
        return self._steps_done

    @property
    def is_begun(self) -> bool:
        """Whether the parameters exist."""
        return self._trained is not None

    def begin(self, x: Tensor, y: Tensor) -> None:
        """Make all parameters and the optimizer, once.

        :param Tensor x: some inputs.
        :param Tensor y: their targets.
        :raises ValueError: whatever the model raises that they do not fit.
        """
        if self.is_begun:
            return
        set_num_data(self.model, self.batch_size, self.who)
        batch = tuple(self._batch(part, torch.arange(self.batch_size) % len(part)) for part in (x, y))
        trained = Trained(self._weighted, self.guide, batch)  # type: ignore[arg-type]
        trained.set_up(self.loss, batch)  # type: ignore[arg-type]
        parameters = {name: p for name, p in trained.parameters(self.loss).items() if p.requires_grad}
        self._parameters = parameters
        self._joint.adopt(stored_names(parameters))
        self._trained = trained

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Take the steps of one call on random batches.

        :param Tensor x: inputs ``[N, ...]``.
        :param Tensor y: targets ``[N, ...]``.
        :raises ValueError: for no rows.
        :raises FloatingPointError: naming what is not finite; no step is taken on it.
        """
        if not len(x) or len(x) != len(y):
            raise ValueError(f"{self.who}: x and y must have as many rows, one at least, got {len(x)} and {len(y)}")
        self.begin(x, y)
        # That of a batch in the graph, that of all rows where users ask the model.
        set_num_data(self.model, self.batch_size, self.who)
        self._weighted.weight.fill_(len(x) / self.batch_size)
        try:
            with unwarned():
                for _ in range(self.steps):
                    rows = self._rows(len(x))
                    self._step((self._batch(x, rows), self._batch(y, rows)))
        finally:
            set_num_data(self.model, len(x), self.who)

    def state_dict(self) -> dict[str, Any]:
        """All that later calls depend on, once :meth:`begin` has made it."""
        if self._trained is None or self._joint.optimizer is None:
            raise RuntimeError(f"{self.who}: begin must come before a state, got none begun")
        return {
            **self._trained.copy_of_state(),
            "optimizer": self._joint.optimizer.state_dict(),
            "steps_done": self.steps_done,
            "loss": states(self._parts),
        }

    def load_state_dict(self, state: dict[str, Any], path: Path | None = None) -> None:
        """Go on from a state; :meth:`begin` must have been called.

        :param dict state: of another of the same model and guide.
        :param path: the file that it is from, for errors.
        :raises ValueError: naming the first entries that differ, for another model or guide.
        """
        if self._trained is None or self._joint.optimizer is None:
            raise RuntimeError(f"{self.who}: begin must come before load_state_dict, got none begun")
        self._trained.check(path or Path("given"), state)
        self._trained.load(state)
        self._joint.optimizer.load_state_dict(state["optimizer"])
        self._steps_done = state["steps_done"]
        load_states(self._parts, state["loss"])
        if self.steps_done:
            set_num_data(self.model, round(float(self._weighted.weight) * self.batch_size), self.who)

    def _step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._joint.forget_gradients()
        if isinstance(self.loss, RadialELBO):
            self.loss.step = self.steps_done
        noise = TorchNoise.now()
        # Compiled from the first use or never: a run that resumes must replay what an undisturbed one does.
        value, gradients = self._captured(batch, {}, also=self._parameters, compile_after=0)
        if not bool(torch.isfinite(value)):
            noise.restore()
            found = culprits(self.loss, self._weighted, self.guide, batch, {}, self._captured.parameters)
            raise FloatingPointError(
                f"{self.who}: not finite in step {self.steps_done}: {', '.join(found) or 'the loss'}; no step was "
                "taken on it; try a smaller learning rate"
            )
        self._joint.step(gradients)
        self._steps_done += 1

    def _rows(self, number: int) -> Tensor:
        """The rows of a batch: none twice before all have come once."""
        passes = -(-self.batch_size // number)
        return torch.cat([torch.randperm(number) for _ in range(passes)])[: self.batch_size]

    def _batch(self, values: Tensor, rows: Tensor) -> Tensor:
        modules = (self.guide, self.model)
        return values[rows].to(device_of(*modules), dtype_of(*modules))

    @property
    def _parts(self) -> dict[str, Any]:
        """What the loss keeps from step to step, such as measurement points; a prior on functions is not trained."""
        return {name: part for name, part in vars(self.loss).items() if not isinstance(part, nn.Module)}


class _Weighted(nn.Module):
    """A model whose observations count as often as a tensor says."""

    weight: Tensor

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("weight", torch.ones((), device=device_of(model), dtype=dtype_of(model)))

    def forward(self, *args: Any) -> Any:
        with _WeighObserved(self.weight):
            return self.model(*args)


class _WeighObserved(Messenger):
    """Multiplies the scale of observed sites."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and not msg["infer"].get("_deterministic", False):
            msg["scale"] = msg["scale"] * self.weight
