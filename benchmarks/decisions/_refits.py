# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training that continues whenever new data arrive."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.optim import Adam

from pyro_radial import TermsELBO
from pyro_radial._pyro.compat import is_deterministic
from pyro_radial.infer.optim.joint import fused_optimizer
from pyro_radial.infer.step.loss_graphs import Graphs
from pyro_radial.infer.training.trainer import Trainer
from pyro_radial.nn.likelihoods import set_num_data
from pyro_radial.nn.modules import dtype_of

DEFAULT_OPTIM: Any = partial(fused_optimizer, Adam, {"lr": 3e-3})


class Refits:
    """Train a model and a guide for some gradient steps at each call, continuing from the last one.

    All batches have the same size, and the scale N / B of the likelihood is a tensor. So one recorded graph serves any
    number of rows; :func:`~pyro_radial.fit` would record one for each number. If a batch is larger than the data, rows
    repeat, all about equally often.

    :param model: a Pyro model ``model(x, y)``, such as a :class:`~pyro_radial.SupervisedModel` with a likelihood
        without ``num_data``.
    :param nn.Module guide: its guide.
    :param TermsELBO loss: loss, as for :func:`~pyro_radial.fit`.
    :param optim: optimizer, as for ``fit``; Adam at 3e-3 by default. Its state is kept from call to call.
    :param int steps: gradient steps of one call.
    :param int batch_size: rows of a batch, B.
    :param bool compile: whether to compile the graph; otherwise it is replayed as recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        *,
        loss: TermsELBO | None = None,
        optim: Any = DEFAULT_OPTIM,
        steps: int = 200,
        batch_size: int = 64,
        compile: bool = True,
    ) -> None:
        self.model = model
        self.guide = guide
        self.loss = TermsELBO() if loss is None else loss
        self.optim = optim
        self.steps = steps
        self.batch_size = batch_size
        self.compile = compile
        self._weighted = _Weighted(model)
        self._graphs = Graphs()
        self._trainer: Trainer | None = None

    @property
    def steps_done(self) -> int:
        """Gradient steps taken so far."""
        return 0 if self._trainer is None else self._trainer.steps_done

    def begin(self, x: Tensor, y: Tensor) -> Trainer:
        """Create all parameters and the optimizer from some inputs and targets, unless they exist."""
        if self._trainer is None:
            set_num_data(self.model, self.batch_size)
            rows = torch.arange(self.batch_size)
            batch = (x[rows % len(x)], y[rows % len(y)])
            self._trainer = Trainer(
                self._weighted,
                self.guide,
                batch,
                loss=self.loss,
                optim=self.optim,
                graphs=self._graphs,
                compile_rows=self.batch_size if self.compile else None,
            )
        return self._trainer

    def refit(self, x: Tensor, y: Tensor) -> None:
        """Take ``steps`` gradient steps on random batches of inputs ``[N, ...]`` and targets ``[N, ...]``."""
        trainer = self.begin(x, y)
        # The recorded graph needs the size of a batch, users of the model the number of rows.
        set_num_data(self.model, self.batch_size)
        self._weighted.weight.fill_(len(x) / self.batch_size)
        for _ in range(self.steps):
            rows = self._rows(len(x))
            trainer.step((x[rows], y[rows]))
        set_num_data(self.model, len(x))

    def _rows(self, number: int) -> Tensor:
        """Random rows of a batch; no row repeats before all have come once."""
        passes = -(-self.batch_size // number)
        return torch.cat([torch.randperm(number) for _ in range(passes)])[: self.batch_size]


class _Weighted(nn.Module):
    """A model whose observations have a weight in a buffer."""

    weight: Tensor

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("weight", torch.ones((), dtype=dtype_of(model)))

    def forward(self, *args: Any) -> Any:
        with _WeighObserved(self.weight):
            return self.model(*args)


class _WeighObserved(Messenger):
    """Multiply the scale of observed sites."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and not is_deterministic(msg):
            msg["scale"] = msg["scale"] * self.weight
