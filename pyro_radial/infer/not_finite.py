# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which number of a training step is NaN or infinite, by name."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.random_state import set_rng_state
from pyro_radial.poutine import one_at_a_time
from pyro_radial.poutine.local_noise import is_drawn

if TYPE_CHECKING:
    from pyro_radial.infer.trained import Trained

__all__ = ["check_parameters", "check_start", "finite_loss", "first_not_finite", "not_finite_error", "unwarned"]


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity; a host-device synchronization for each tensor."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def not_finite_error(culprits: Iterable[str], where: str) -> FloatingPointError:
    """The error of a training that has diverged.

    :param culprits: what is not finite, in words.
    :param str where: the epoch and step.
    """
    return FloatingPointError(f"fit: not finite in {where}: {', '.join(culprits)}; try a smaller learning rate")


def check_parameters(parameters: Mapping[str, Tensor], where: str) -> None:
    """Raise a ``FloatingPointError`` that names the first parameter that is not finite."""
    broken = first_not_finite(parameters.items())
    if broken is not None:
        raise not_finite_error([f"parameter {broken}"], where)


def check_start(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a ``FloatingPointError`` that names the first parameter that no training can start from."""
    broken = first_not_finite(parameters)
    if broken is not None:
        raise FloatingPointError(
            f"fit: not finite before the first step: parameter {broken}; make model and guide anew, also to go on from "
            "a checkpoint"
        )


@contextmanager
def unwarned() -> Iterator[None]:
    """Without Pyro's warnings of NaN in log-densities, which end a training here by the name of the site.

    Not by a filter of warnings, which is one for all threads: Pyro does not look for NaN meanwhile.
    """
    with one_at_a_time(), pyro.settings.context(validate_poutine=False):
        yield


def finite_loss(
    trained: "Trained", loss: RadialELBO, batch: tuple[Any, Any], noise: dict[str, Any], where: str
) -> Tensor:
    """The loss of a batch.

    :param Trained trained: model and guide.
    :param RadialELBO loss: the loss, which keeps its terms.
    :param batch: inputs and targets.
    :param noise: the state of the random number generators to start from.
    :param str where: the epoch and step, for the error.
    :returns: a 0-d tensor to differentiate.
    :raises FloatingPointError: naming the parameter, the draw or the term, if the loss is NaN or infinite.
    """
    module = trained.module(loss)
    set_rng_state(noise, trained.device)
    try:
        value: Tensor = module(*batch)
    except ValueError as error:
        # Validation stops at the first value that is not finite; without it the terms say where that came from.
        culprits = _culprits(trained, loss, batch, noise)
        if not culprits:
            raise
        raise not_finite_error(culprits, where) from error
    if not bool(torch.isfinite(value)):
        check_parameters(trained.parameters(loss), where)
        raise not_finite_error(loss.terms.not_finite() or ["the sum of the loss's terms"], where)
    return value


def _culprits(trained: "Trained", loss: RadialELBO, batch: tuple[Any, Any], noise: dict[str, Any]) -> list[str]:
    """What was not finite in a loss that validation has stopped, by taking the same steps without it."""
    parameter = first_not_finite(trained.parameters(loss).items())
    if parameter is not None:
        return [f"parameter {parameter}"]
    with pyro.validation_enabled(False), torch.no_grad():
        set_rng_state(noise, trained.device)
        drawn: Any = poutine.trace(trained.guide).get_trace(*batch).iter_stochastic_nodes()
        site = first_not_finite((name, node["value"]) for name, node in drawn if is_drawn(node))
        if site is not None:
            return [f"a draw of site '{site}'"]
        set_rng_state(noise, trained.device)
        trained.module(loss)(*batch)
    return loss.terms.not_finite()
