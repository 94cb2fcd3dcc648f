# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What distributions of a direction have in common whose density depends on the angle to a mean direction alone."""

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from pyro_radial.distributions.constraints import finite_nonnegative
from pyro_radial.distributions.special import accumulation_dtype

__all__ = ["RotationallySymmetric", "accumulated", "check_dim", "check_same_sphere"]

_Same = TypeVar("_Same", bound="RotationallySymmetric")


class RotationallySymmetric(TorchDistribution):
    r"""Base of distributions with a mean direction and a concentration: their arguments, shapes and ``expand``.

    :param Tensor loc: :math:`\mu`, the mean direction: unit vectors, ``[*batch, m]`` with m at least 2.
    :param concentration: at least 0 and finite, ``[*batch]``; broadcasts with the batch of ``loc``.
    :raises ValueError: if an argument is not floating point, the shapes do not broadcast, m is less than 2, or (under
        validation) ``loc`` is not of length 1, or ``concentration`` negative or not finite.
    """

    arg_constraints = {"loc": constraints.sphere, "concentration": finite_nonnegative}
    support = constraints.sphere
    has_rsample = True

    def __init__(self, loc: Tensor, concentration: Any, validate_args: bool | None = None) -> None:
        loc, concentration = _checked(type(self).__name__, loc, concentration)
        try:
            batch_shape = torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
        except RuntimeError:
            raise ValueError(
                f"{type(self).__name__}: loc of shape {tuple(loc.shape)} and concentration of shape "
                f"{tuple(concentration.shape)} do not broadcast: concentration has one element for each row of loc"
            ) from None
        self.loc, self.concentration = loc.expand(batch_shape + loc.shape[-1:]), concentration.expand(batch_shape)
        super().__init__(batch_shape, torch.Size(loc.shape[-1:]), validate_args=validate_args)

    @staticmethod
    def infer_shapes(  # type: ignore[override]
        loc: torch.Size, concentration: torch.Size = torch.Size(())
    ) -> tuple[torch.Size, torch.Size]:
        """Batch and event shape from the shapes of the arguments, without making a distribution."""
        return torch.broadcast_shapes(loc[:-1], concentration), torch.Size(loc[-1:])

    def expand(self: _Same, batch_shape: Sequence[int], _instance: _Same | None = None) -> _Same:
        """The same distribution with a larger batch shape; shares memory."""
        new = self._get_checked_instance(RotationallySymmetric, _instance)
        batch_shape = torch.Size(batch_shape)
        new.loc = self.loc.expand(batch_shape + self.event_shape)
        new.concentration = self.concentration.expand(batch_shape)
        super(RotationallySymmetric, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def dim(self) -> int:
        """m, the dimension of the space that the sphere lies in."""
        # A plain number also where a compiler leaves shapes open: the formulas differ by it.
        return operator.index(self.event_shape[0])

    @property
    def mode(self) -> Tensor:  # noqa: D102
        return self.loc

    def _column(self, rows: Tensor) -> Tensor:
        return rows.to(self.loc.dtype).unsqueeze(-1)


def accumulated(distribution: RotationallySymmetric) -> Tensor:
    """The concentration in the dtype of sums, so that results are rounded once."""
    return distribution.concentration.to(accumulation_dtype(distribution.concentration))


def check_same_sphere(q: TorchDistribution, p: TorchDistribution) -> None:
    """Leave two distributions on spheres of different dimensions to sampling, which names them.

    :raises NotImplementedError: where they differ.
    """
    if q.event_shape != p.event_shape:
        raise NotImplementedError


def check_dim(distribution: str, name: str, dim: int) -> None:
    """Refuse a sphere that is none.

    :raises ValueError: naming the class and the argument.
    """
    if dim < 2:
        raise ValueError(
            f"{distribution}: {name} must be at least 2, got {dim}; in one dimension a direction is a sign: use a "
            "distribution of signs, such as a Rademacher or Bernoulli one, or a normal"
        )


def _checked(distribution: str, loc: Any, concentration: Any) -> tuple[Tensor, Tensor]:
    """Both arguments as floating-point tensors, or an error that names the argument."""
    if not isinstance(loc, Tensor) or loc.dim() == 0:
        raise ValueError(f"{distribution}: loc must be a tensor of unit vectors, got {loc!r}")
    if not isinstance(concentration, Tensor | int | float) or isinstance(concentration, bool):
        raise TypeError(f"{distribution}: concentration must be a tensor or a number, got {concentration!r}")
    concentration = torch.as_tensor(
        concentration, device=loc.device, dtype=None if isinstance(concentration, Tensor) else loc.dtype
    )
    for name, argument in (("loc", loc), ("concentration", concentration)):
        if not argument.is_floating_point():
            raise ValueError(f"{distribution}: {name} must be a floating-point tensor, got {argument.dtype}")
    check_dim(distribution, "the last dimension of loc", loc.shape[-1])
    return loc, concentration
