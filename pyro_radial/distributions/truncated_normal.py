# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The normal distribution cut off at so many standard deviations on both sides of its mean."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistribution
from scipy.special import erf, gammainc
from torch import Tensor
from torch.distributions.utils import broadcast_all

from pyro_radial._pyro.checks import positive_float
from pyro_radial.distributions.constraints import finite_positive

__all__ = ["TruncatedNormal"]


class TruncatedNormal(TorchDistribution):
    r"""A normal distribution, given that it is within c of its ``scale`` from its mean.

    .. math::
        w = \mu + \sigma z, \qquad z \sim N(0, 1) \text{ given } |z| \le c, \qquad
        \log p(w) = -\tfrac12 z^2 - \tfrac12 \log 2 \pi - \log \sigma - \log Z, \quad Z = \mathrm{erf}(c / \sqrt 2).

    The standard deviation is :math:`\sigma \sqrt v`, with v the variance of z, a ratio of two chi-square
    probabilities, :math:`v = F_3(c^2) / F_1(c^2) = 1 - 2 c \, \varphi(c) / Z`. It comes near :math:`N(\mu, \sigma^2)`
    for large c and near a uniform distribution for small. The density is zero beyond c, although every real value may
    be asked about: so it is a posterior rather than a prior, under which what lies beyond has an infinite loss.

    :param Tensor loc: :math:`\mu`, the mean; broadcasts with ``scale``.
    :param Tensor scale: :math:`\sigma`, positive and finite: the standard deviation of the normal that is cut off.
    :param float truncation: c, positive and finite.
    :raises ValueError: naming the argument, if ``truncation`` is not positive and finite, or (under validation)
        ``scale`` is not or ``loc`` is NaN.

    Example::

        >>> distribution = TruncatedNormal(torch.zeros(3), 1.0, truncation=1.0)
        >>> distribution.stddev
        tensor([0.5396, 0.5396, 0.5396])
        >>> bool((distribution.sample((100,)).abs() <= 1.0).all())
        True
    """

    arg_constraints = {"loc": constraints.real, "scale": finite_positive}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Any, scale: Any, truncation: float, *, validate_args: bool | None = None) -> None:
        self.loc, self.scale = broadcast_all(loc, scale)
        self.truncation = positive_float("TruncatedNormal: truncation", truncation)
        super().__init__(torch.Size(self.loc.shape), validate_args=validate_args)

    @staticmethod
    def infer_shapes(  # type: ignore[override]
        loc: torch.Size = torch.Size(()), scale: torch.Size = torch.Size(()), truncation: Any = None
    ) -> tuple[torch.Size, torch.Size]:
        """Batch and event shape from the shapes of the arguments, without making a distribution."""
        return torch.Size(torch.broadcast_shapes(loc, scale)), torch.Size(())

    def expand(self, batch_shape: Sequence[int], _instance: "TruncatedNormal | None" = None) -> "TruncatedNormal":
        """The same distribution with a larger batch shape; shares memory."""
        new = self._get_checked_instance(TruncatedNormal, _instance)
        batch_shape = torch.Size(batch_shape)
        new.loc, new.scale, new.truncation = (
            self.loc.expand(batch_shape),
            self.scale.expand(batch_shape),
            self.truncation,
        )
        super(TruncatedNormal, new).__init__(batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mass(self) -> float:
        """Z, how much of the normal is left."""
        return float(erf(self.truncation / math.sqrt(2.0)))

    @property
    def unit_variance(self) -> float:
        """v, the variance at scale one."""
        half_square = 0.5 * self.truncation**2
        return float(gammainc(1.5, half_square) / gammainc(0.5, half_square))

    @property
    def negentropy(self) -> float:
        r"""By how much the entropy is below that of the normal of its moments, in nats for each element.

        :math:`J = \tfrac12 (1 + \log v - v) - \log Z`, a function of the truncation alone.
        """
        variance = self.unit_variance
        return 0.5 * (1.0 + math.log(variance) - variance) - math.log(self.mass)

    @property
    def mean(self) -> Tensor:  # noqa: D102
        return self.loc

    @property
    def mode(self) -> Tensor:  # noqa: D102
        return self.loc

    @property
    def variance(self) -> Tensor:
        r""":math:`\sigma^2 v`."""
        return self.scale.square() * self.unit_variance

    @property
    def stddev(self) -> Tensor:
        r""":math:`\sigma \sqrt v`."""
        return self.scale * math.sqrt(self.unit_variance)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """A draw through which gradients flow to ``loc`` and ``scale``, ``[*sample_shape, *batch]``."""
        shape = self._extended_shape(torch.Size(sample_shape))
        uniform = torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device)
        return torch.addcmul(self.loc, self.scale, self._unit_quantile(uniform))

    def log_prob(self, value: Tensor) -> Tensor:
        """The normalized log-density, ``[*sample, *batch]``; minus infinity beyond the truncation."""
        if self._validate_args:
            self._validate_sample(value)
        distance = (value - self.loc).abs()
        unit = distance / self.scale
        inside = -0.5 * unit.square() - self.scale.log() - (0.5 * math.log(2.0 * math.pi) + math.log(self.mass))
        # A draw at the edge may be rounded beyond it, by an ulp of itself or of the mean.
        rounding = 4.0 * torch.finfo(self.loc.dtype).eps * (distance + self.loc.abs())
        return torch.where(distance <= self.truncation * self.scale + rounding, inside, -math.inf)

    def entropy(self) -> Tensor:
        """Exact differential entropy in nats, ``[*batch]``."""
        of_normal = self.stddev.log() + 0.5 * (1.0 + math.log(2.0 * math.pi))
        return of_normal - self.negentropy

    def icdf(self, value: Tensor) -> Tensor:
        """The value below which a draw is with this probability."""
        return self.loc + self.scale * self._unit_quantile(value)

    def _unit_quantile(self, probability: Tensor) -> Tensor:
        """Quantiles at loc 0 and scale 1."""
        quantile = torch.erfinv(self.mass * (2.0 * probability - 1.0)) * math.sqrt(2.0)
        # Of a mass that rounds to one the ends are infinite.
        return quantile.clamp(-self.truncation, self.truncation)
