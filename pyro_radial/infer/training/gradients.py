# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss of a batch and its gradients: from the program or from a graph of it, and in parts."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.infer.elbo import LossTerms, TermsELBO
from pyro_radial.infer.training.data import num_rows, parts
from pyro_radial.infer.training.natural_gradient import NaturalGradientOptimizer
from pyro_radial.infer.training.not_finite import not_finite_error, not_finite_parts
from pyro_radial.poutine import mean_only

__all__ = [
    "TERMS",
    "CompiledGradients",
    "EagerGradients",
    "Gradients",
    "LossGradients",
    "accumulated",
    "of_means",
]

TERMS = ("loss", "nll", "kl")

#: Adds the gradients of a batch, times a share, to ``.grad`` of the parameters; its arguments are the batch, the number
#: of optimizer steps taken so far and the share. Returns the ``TERMS``, times the share, in nats per datum.
Gradients = Callable[[Any, int, float], list[float]]


class LossGradients(ABC):
    """Add the gradients of one loss to the parameters; ``check`` raises an error if the terms are wrong."""

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        loss: TermsELBO,
        parameters: Mapping[str, Tensor],
        check: Callable[[LossTerms], None] | None = None,
    ) -> None:
        self.model, self.guide, self.loss, self.parameters, self.check = model, guide, loss, parameters, check

    def __call__(self, batch: tuple[Any, Any], step: int, share: float = 1.0) -> list[float]:
        """See :data:`Gradients`."""
        noise, self.loss.step = TorchNoise.now(), step
        try:
            add = self.evaluate(batch)
        except ValueError as error:
            # Validation stops at the first value that is not finite, and may not say where that came from.
            found = self._not_finite(batch, noise)
            if not found:
                raise
            raise not_finite_error(found, step) from error
        self._check_terms()
        each = self.loss.terms.per_datum()
        terms: list[float] = torch.stack([each.loss, each.negative_log_likelihood, each.kl]).tolist()
        if not math.isfinite(terms[0]):
            raise not_finite_error(self._not_finite(batch, noise) or ["the sum of the terms of the loss"], step)
        if share:
            add(share)
        return [term * share for term in terms]

    @abstractmethod
    def evaluate(self, batch: tuple[Any, Any]) -> Callable[[float], None]:
        """Evaluate the loss; returns a function that adds its gradients, times a share."""

    def _check_terms(self) -> None:
        if self.check is not None:
            self.check(self.loss.terms)

    def _not_finite(self, batch: tuple[Any, Any], noise: TorchNoise) -> list[str]:
        noise.restore()
        step = self.loss.step
        found: list[str] = []
        # The search evaluates without validation: its own error must not hide the first one.
        with suppress(Exception):
            found = not_finite_parts(self.loss, self.model, self.guide, batch, {}, self.parameters)
        self.loss.step = step
        return found


class EagerGradients(LossGradients):
    """Run the Pyro program as it is."""

    def __init__(self, *arguments: Any, scaler: torch.amp.GradScaler) -> None:
        super().__init__(*arguments)
        self.scaler = scaler

    def evaluate(self, batch: tuple[Any, Any]) -> Callable[[float], None]:
        """Evaluate the loss."""
        value: Tensor = self.loss(self.model, self.guide)(*batch)  # type: ignore[arg-type]
        return lambda share: self.scaler.scale(value * share).backward()


class CompiledGradients(LossGradients):
    """Replay graphs of the loss, compiled for batches of ``compile_rows`` rows and otherwise as recorded.

    A graph is compiled at its first use or never, so that a resumed run replays what an undisturbed run does. If an
    ``optimizer`` is given, its step is part of the graph.
    """

    def __init__(self, *arguments: Any, compile_rows: int, optimizer: NaturalGradientOptimizer | None = None) -> None:
        super().__init__(*arguments)
        self.compile_rows, self.optimizer = compile_rows, optimizer
        self.captured = CapturedLoss(self.model, self.guide, self.loss)

    def evaluate(self, batch: tuple[Any, Any]) -> Callable[[float], None]:
        """Evaluate the loss."""
        self.captured.compile_after = 0 if num_rows(batch[0]) == self.compile_rows else None
        update = None if self.optimizer is None else self.optimizer.in_graph(self._check_terms)
        _, gradients = self.captured(batch, {}, also=self.parameters, update=update)

        def add(share: float) -> None:
            for parameter, gradient in gradients:
                part = gradient if share == 1.0 else gradient * share
                parameter.grad = part if parameter.grad is None else parameter.grad + part

        return add


def of_means(gradients: Gradients) -> Gradients:
    """Evaluate the network at the means of the weights."""

    def evaluate(batch: Any, step: int, share: float = 1.0) -> list[float]:
        with mean_only():
            return gradients(batch, step, share)

    return evaluate


def accumulated(gradients: Gradients, number: int) -> Gradients:
    """Split each batch into parts that see the same draw of the weights."""

    def evaluate(batch: Any, step: int, share: float = 1.0) -> list[float]:
        noise, totals = TorchNoise.now(), [0.0] * len(TERMS)
        for part, part_share in parts(batch, number):
            noise.restore()
            terms = gradients(part, step, share * part_share)
            totals = [total + term for total, term in zip(totals, terms, strict=True)]
        return totals

    return evaluate if number > 1 else gradients
