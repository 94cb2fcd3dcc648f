# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A random radius times a random direction, as one distribution of a vector."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import (
    Distribution,
    Gamma,
    HalfCauchy,
    HalfNormal,
    InverseGamma,
    LogNormal,
    kl_divergence,
)

from pyro_radial._pyro.checks import check_shape, check_types, joint_shape
from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.distributions.numerics import (
    MEAN_LOG_HALF_NORMAL,
    accumulation_dtype,
    begin_expand,
)
from pyro_radial.distributions.wrappers import expand_copy


class RadialDirectional(TorchDistribution):
    r"""Multiply a radius by an independent direction: a distribution of vectors in :math:`R^n`.

    .. math:: w = r u, \qquad
        \log p(w) = \log p_\mathrm{rad}(\|w\|) + \log p_\mathrm{dir}(w / \|w\|) - (n - 1) \log \|w\|.

    With ``HalfNormal(1)`` and a uniform direction this is exactly ``RadialNormal(zeros(n), ones(n))``. At zero, which
    has no mass, the density is defined as +inf if the support of the radius includes zero and as 0 otherwise; the
    gradient there is zero.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 3.
    Their formula lacks the last term, the Jacobian of polar coordinates, so it is not a density on :math:`R^n`.

    :param radius: a positive univariate distribution, batch shape ``[*batch]``.
    :param direction: a distribution on the unit sphere, event shape ``[n]`` with n >= 2, for example
        :class:`~pyro_radial.distributions.VonMisesFisherStable`; its batch shape broadcasts with that of ``radius``.
    :raises ValueError: naming the argument, if its shape or support does not fit.

    Example::

        >>> import pyro.distributions as dist
        >>> from pyro_radial.distributions import HypersphericalUniform
        >>> rows = RadialDirectional(dist.LogNormal(torch.zeros(200), 0.1), HypersphericalUniform(784))
        >>> rows.batch_shape, rows.event_shape
        (torch.Size([200]), torch.Size([784]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.real_vector

    def __init__(self, radius: Any, direction: Any, *, validate_args: bool | None = None) -> None:
        check_types(bool | None, validate_args=validate_args)
        check_types(Distribution, radius=radius, direction=direction)
        if len(radius.event_shape) != 0 or radius.support.is_discrete or is_real(radius.support):
            raise ValueError(
                f"RadialDirectional: radius must be a positive univariate distribution, got {type(radius).__name__} of "
                f"event shape {tuple(radius.event_shape)} on {radius.support}"
            )
        if len(direction.event_shape) != 1 or not is_on_sphere(direction.support):
            raise ValueError(
                "RadialDirectional: direction must be a distribution of unit vectors, got "
                f"{type(direction).__name__} of event shape {tuple(direction.event_shape)} on {direction.support}"
            )
        if direction.event_shape[0] < 2:
            raise ValueError(
                "RadialDirectional: direction must have at least two dimensions, got one"
            )
        batch_shape = joint_shape(
            "RadialDirectional", radius=radius.batch_shape, direction=direction.batch_shape
        )
        # Both have the full batch, so that each element has its own draws.
        self.radius = expand_copy(radius, batch_shape)
        self.direction = expand_copy(direction, batch_shape)
        super().__init__(batch_shape, direction.event_shape, validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """Return whether both distributions have reparameterized draws."""
        return bool(self.radius.has_rsample and self.direction.has_rsample)

    def expand(
        self, batch_shape: Sequence[int], _instance: "RadialDirectional | None" = None
    ) -> "RadialDirectional":
        """Return the same distribution with a larger batch shape; it shares memory."""
        new = begin_expand(self, RadialDirectional, batch_shape, _instance)
        new.radius = expand_copy(self.radius, new.batch_shape)
        new.direction = expand_copy(self.direction, new.batch_shape)
        return new

    @property
    def mean(self) -> Tensor:
        """Return E[r] E[u], if both distributions have a mean."""
        return self.radius.mean.unsqueeze(-1) * self.direction.mean

    @property
    def variance(self) -> Tensor:
        """Return the variance of each element; the elements are not independent."""
        mean = self.radius.mean.unsqueeze(-1)
        variance = self.radius.variance.unsqueeze(-1)
        mean_square = self.direction.variance + self.direction.mean.square()
        # E[r^2] E[u^2] - E[r]^2 E[u]^2, without the difference of large numbers.
        return variance * mean_square + mean.square() * self.direction.variance

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw a sample without gradients, ``[*sample_shape, *batch, n]``."""
        shape = check_shape("sample_shape", sample_shape)
        return self.radius.sample(shape).unsqueeze(-1) * self.direction.sample(shape)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw a sample with gradients to both distributions, ``[*sample_shape, *batch, n]``."""
        shape = check_shape("sample_shape", sample_shape)
        return self.radius.rsample(shape).unsqueeze(-1) * self.direction.rsample(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the normalized log-density on :math:`R^n`, ``[*sample, *batch]``."""
        # Torch cannot check the support of a tensor without elements.
        if self._validate_args and not (isinstance(value, Tensor) and value.numel() == 0):
            self._validate_sample(value)
        dim = self.event_shape[0]
        norm = torch.linalg.vector_norm(value, dim=-1, dtype=accumulation_dtype(value))
        away = norm > 0
        # At zero any radius and direction will do: the density there is set below, and no gradient passes.
        rho = torch.where(away, norm, 1.0)
        unit = torch.where(away.unsqueeze(-1), value / rho.to(value.dtype).unsqueeze(-1), dim**-0.5)
        log_direction = self.direction.log_prob(unit)
        density = self.radius.log_prob(rho) + log_direction - (dim - 1) * rho.log()
        at_pole = torch.where(self.radius.support.check(torch.zeros_like(rho)), math.inf, -math.inf)
        return torch.where(away, density, at_pole).to(
            torch.promote_types(value.dtype, log_direction.dtype)
        )

    def entropy(self) -> Tensor:
        r"""Return the entropy in nats, :math:`H_\mathrm{rad} + H_\mathrm{dir} + (n - 1) E[\log r]`, ``[*batch]``.

        :raises NotImplementedError: if E[log r] has no formula here; it has one for ``LogNormal``, ``HalfNormal``,
            ``Gamma``, ``InverseGamma`` and ``HalfCauchy``.
        """
        mean_jacobian = (self.event_shape[0] - 1) * mean_log(self.radius)
        return self.radius.entropy() + self.direction.entropy() + mean_jacobian


MEAN_LOGS: dict[type[Distribution], Callable[[Any], Tensor]] = {
    LogNormal: lambda distribution: distribution.loc,
    HalfNormal: lambda distribution: distribution.scale.log() + MEAN_LOG_HALF_NORMAL,
    HalfCauchy: lambda distribution: distribution.scale.log(),
    Gamma: lambda distribution: distribution.concentration.digamma() - distribution.rate.log(),
    InverseGamma: lambda distribution: (
        distribution.rate.log() - distribution.concentration.digamma()
    ),
}


def mean_log(distribution: Distribution) -> Tensor:
    """Return E[log r] of a positive distribution, in closed form."""
    for cls, formula in MEAN_LOGS.items():
        if isinstance(distribution, cls):
            return formula(distribution)
    raise NotImplementedError(
        f"E[log r] of {type(distribution).__name__} is not known in closed form"
    )


def kl_radial_directional(q: RadialDirectional, p: RadialDirectional) -> Tensor:
    """Return the KL of the radii plus that of the directions: the Jacobian is the same on both sides."""
    return kl_divergence(q.radius, p.radius) + kl_divergence(q.direction, p.direction)
