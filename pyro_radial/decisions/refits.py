# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training that goes on where it was each time that data have come in."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.optim import Adam

from pyro_radial._pyro.checks import positive_count
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.training.checkpoint import Checkpoint
from pyro_radial.infer.training.data import device_of, dtype_of
from pyro_radial.infer.training.optimizers import check_optim, fused_optimizer
from pyro_radial.infer.training.trainer import Trainer
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
        loss: RadialELBO | None = None,
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
        if not hasattr(type(self.loss), "terms"):
            raise ValueError(f"{who}: loss must keep its terms, as RadialELBO does, got {type(loss).__name__}")
        check_optim(optim)
        self.optim, self.compile = optim, compile
        self.steps = positive_count(f"{who}: steps", steps)
        self.batch_size = positive_count(f"{who}: batch_size", batch_size)
        self._weighted = _Weighted(model)
        self._trainer: Trainer | None = None

    @property
    def steps_done(self) -> int:
        """Gradient steps taken in all."""
        return 0 if self._trainer is None else self._trainer.steps_done

    @property
    def is_begun(self) -> bool:
        """Whether the parameters exist."""
        return self._trainer is not None

    def begin(self, x: Tensor, y: Tensor) -> None:
        """Make all parameters and the optimizer, once.

        :param Tensor x: some inputs.
        :param Tensor y: their targets.
        :raises ValueError: whatever the model raises that they do not fit.
        """
        if self.is_begun:
            return
        set_num_data(self.model, self.batch_size, self.who)
        rows = torch.arange(self.batch_size)
        batch = (self._batch(x, rows % len(x)), self._batch(y, rows % len(y)))
        # All batches have one size, so that one graph serves; -1 replays it as it was recorded.
        compile_rows = self.batch_size if self.compile else -1
        self._trainer = Trainer(
            self._weighted, self.guide, batch, loss=self.loss, optim=self.optim, compile_rows=compile_rows
        )

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
            for _ in range(self.steps):
                rows = self._rows(len(x))
                self._begun.step((self._batch(x, rows), self._batch(y, rows)))
        finally:
            set_num_data(self.model, len(x), self.who)

    def state_dict(self) -> dict[str, Any]:
        """All that later calls depend on, once :meth:`begin` has made it."""
        return self._begun.state_dict()

    def load_state_dict(self, state: dict[str, Any], path: Path | None = None) -> None:
        """Go on from a state; :meth:`begin` must have been called.

        :param dict state: of another of the same model and guide.
        :param path: the file that it is from, for errors.
        :raises ValueError: naming the first entries that differ, for another model or guide.
        """
        self._begun.check_entries(Checkpoint(path or "given"), state)
        self._begun.load_state_dict(state)
        if self.steps_done:
            set_num_data(self.model, round(float(self._weighted.weight) * self.batch_size), self.who)

    @property
    def _begun(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError(f"{self.who}: begin must come before a state, got none begun")
        return self._trainer

    def _rows(self, number: int) -> Tensor:
        """The rows of a batch: none twice before all have come once."""
        passes = -(-self.batch_size // number)
        return torch.cat([torch.randperm(number) for _ in range(passes)])[: self.batch_size]

    def _batch(self, values: Tensor, rows: Tensor) -> Tensor:
        modules = (self.guide, self.model)
        return values[rows].to(device_of(*modules), dtype_of(*modules))


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
