# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Constraints that exclude infinity, and questions about the values that a constraint allows."""

import math
from typing import Any

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import biject_to, transform_to

# The constraint of a mixture's support; in torch 2.7 that is the constraint of its components.
MIXTURES: tuple[Any, ...] = tuple(
    getattr(constraints, name)
    for name in ("MixtureSameFamilyConstraint",)
    if hasattr(constraints, name)
)


class _Finite(constraints.Constraint):
    """A half-line without infinity; torch's own constraints include it."""

    def __init__(self, name: str, base_constraint: constraints.Constraint) -> None:
        self.name = name
        self.base_constraint = base_constraint

    def check(self, value: Tensor) -> Tensor:
        return self.base_constraint.check(value) & (value < math.inf)

    def __repr__(self) -> str:
        return f"{self.name}()"


def _transform_to_base(constraint: Any) -> torch.distributions.Transform:
    return biject_to(constraint.base_constraint)


# torch knows no transform to the support of a mixture, so autoguides could not start.
for _kind in (_Finite, *MIXTURES):
    biject_to.register(_kind, _transform_to_base)
    transform_to.register(_kind, _transform_to_base)


finite_positive = _Finite("FinitePositive", constraints.positive)
finite_nonnegative = _Finite("FiniteNonnegative", constraints.nonnegative)


def is_real(support: object) -> bool:
    """Return whether a constraint allows every real value, for any shape."""
    return _innermost(support) is constraints.real


def is_on_sphere(support: object) -> bool:
    """Return whether a constraint allows unit vectors, for any shape."""
    return _innermost(support) is constraints.sphere


def _innermost(support: Any) -> object:
    wrappers: Any = (constraints.independent, *MIXTURES)
    while isinstance(support, wrappers):
        support = support.base_constraint
    return support
