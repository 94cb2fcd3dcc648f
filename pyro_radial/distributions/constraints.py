# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Constraints that leave infinity out."""

import math

import torch
from pyro.distributions import constraints
from torch import Tensor
from torch.distributions import biject_to, transform_to

__all__ = ["finite_nonnegative", "finite_positive"]


class _Finite(constraints.Constraint):
    """What a half-line's constraint lets pass, but for infinity, which torch's own do."""

    def __init__(self, name: str, half_line: constraints.Constraint) -> None:
        self.name, self.half_line = name, half_line

    def check(self, value: Tensor) -> Tensor:
        return self.half_line.check(value) & (value < math.inf)

    def __repr__(self) -> str:
        return f"{self.name}()"


@biject_to.register(_Finite)
@transform_to.register(_Finite)
def _transform_to_finite(constraint: _Finite) -> torch.distributions.Transform:
    return biject_to(constraint.half_line)


finite_positive = _Finite("FinitePositive", constraints.positive)
finite_nonnegative = _Finite("FiniteNonnegative", constraints.nonnegative)
