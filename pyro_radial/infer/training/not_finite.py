# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The errors of numbers that are NaN or infinite, by name, in the place of Pyro's warnings."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import pyro
from torch import Tensor

from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial.infer.training.culprits import first_not_finite

__all__ = ["check_parameters", "check_start", "not_finite_error", "unwarned"]


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
