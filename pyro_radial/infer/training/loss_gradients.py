# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The gradients of one training step: of the program as it is, or of a graph of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.random_state import set_rng_state
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.loss_terms import LossTerms
from pyro_radial.infer.training.culprits import culprits
from pyro_radial.infer.training.data import num_rows
from pyro_radial.infer.training.gradient_step import GradientStep
from pyro_radial.infer.training.not_finite import not_finite_error
from pyro_radial.infer.training.trained import Trained

__all__ = ["LossGradients"]

# Adds the gradients of the loss, times a share.
Add = Callable[[float], None]


class LossGradients:
    """Adds the gradients of one loss, part by part.

    :param Trained trained: model and guide.
    :param RadialELBO loss: a loss that keeps its terms.
    :param GradientStep step: what the gradients are added for.
    :param int compile_rows: the rows of a batch whose graph is compiled; those of others are replayed as recorded. None
        for no graphs at all.
    """

    def __init__(self, trained: Trained, loss: RadialELBO, step: GradientStep, compile_rows: int | None) -> None:
        self.trained, self.loss, self.step, self._compile_rows = trained, loss, step, compile_rows
        graphs = compile_rows is not None
        self._captured = CapturedLoss(trained.run, trained.guide, loss) if graphs else None
        self._parameters = trained.parameters(loss)

    def add(
        self,
        batch: tuple[Any, Any],
        share: float,
        noise: dict[str, Any],
        where: str,
        check: Callable[[LossTerms], None],
    ) -> list[float]:
        """Add the gradients of a part of a batch.

        :param batch: inputs and targets.
        :param float share: what the gradients are multiplied by.
        :param noise: the state of the random number generators to start from.
        :param str where: the epoch and step, for the error.
        :param check: is called with the terms, and raises what is wrong with them.
        :returns: the loss, the negative log-likelihood and the KL in nats per datum, in one look at the device.
        :raises FloatingPointError: naming the parameter, the draw or the term, if the loss is NaN or infinite.
        """
        set_rng_state(noise, self.trained.device)
        try:
            add = self._eagerly(batch) if self._captured is None else self._from_graph(self._captured, batch)
        except ValueError as error:
            # Validation stops at the first value that is not finite; without it the terms say where that came from.
            found = self._culprits(batch, noise)
            if not found:
                raise
            raise not_finite_error(found, where) from error
        check(self.loss.terms)
        numbers = _numbers(self.loss.terms)
        if not math.isfinite(numbers[0]):
            raise not_finite_error(self._culprits(batch, noise) or ["the sum of the loss's terms"], where)
        if share:
            add(share)
        return numbers

    def _eagerly(self, batch: tuple[Any, Any]) -> Add:
        value: Tensor = self.trained.module(self.loss)(*batch)
        return lambda share: self.step.backward(value * share)

    def _from_graph(self, captured: CapturedLoss, batch: tuple[Any, Any]) -> Add:
        # From the first use or never: a run that resumes must replay what an undisturbed one does.
        compile_after = 0 if num_rows(batch[0]) == self._compile_rows else None
        _, gradients = captured(batch, {}, also=self._parameters, compile_after=compile_after)
        return lambda share: self.step.add(gradients, share)

    def _culprits(self, batch: tuple[Any, Any], noise: dict[str, Any]) -> list[str]:
        """What was not finite, by taking the same steps again."""
        set_rng_state(noise, self.trained.device)
        step = self.loss.step
        found = culprits(self.loss, self.trained.run, self.trained.guide, batch, {}, self._parameters)
        self.loss.step = step
        return found


def _numbers(terms: LossTerms) -> list[float]:
    each = terms.per_datum()
    own: Sequence[Tensor] = (each.loss, each.negative_log_likelihood, each.kl)
    numbers: list[float] = torch.stack([torch.as_tensor(number) for number in own]).tolist()
    return numbers
