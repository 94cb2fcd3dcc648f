# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Define the truncated normal distribution and its family, by the public protocol for families."""

import math
from typing import Any

import torch
from pyro.distributions import Normal, constraints
from pyro.distributions.torch_distribution import TorchDistribution
from scipy.special import erf, gammainc
from torch import Tensor
from torch.distributions import register_kl
from torch.distributions.utils import broadcast_all

from pyro_radial.infer.autoguide.families import LocScale


class TruncatedNormal(TorchDistribution):
    r"""Make a normal distribution, given that it is within c of its ``scale`` from its mean.

    .. math::
        w = \mu + \sigma z, \qquad z \sim N(0, 1) \text{ given } |z| \le c, \qquad
        \log p(w) = -\tfrac12 z^2 - \tfrac12 \log 2 \pi - \log \sigma - \log Z, \quad Z = \mathrm{erf}(c / \sqrt 2).

    The standard deviation is :math:`\sigma \sqrt v`, where v, the variance of z, is a ratio of two chi-square
    probabilities, :math:`v = F_3(c^2) / F_1(c^2)`.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Any, scale: Any, truncation: float, *, validate_args: bool | None = None) -> None:
        self.loc, self.scale = broadcast_all(loc, scale)
        self.truncation = truncation
        self.mass = float(erf(truncation / math.sqrt(2.0)))
        half_square = 0.5 * truncation**2
        self.unit_variance = float(gammainc(1.5, half_square) / gammainc(0.5, half_square))
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> "TruncatedNormal":
        """Return the same distribution with a larger batch shape."""
        loc, scale = self.loc.expand(batch_shape), self.scale.expand(batch_shape)
        return TruncatedNormal(loc, scale, self.truncation, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * self.unit_variance

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draw by the quantile function, with gradients."""
        uniform = torch.rand(self._extended_shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        quantile = torch.erfinv(self.mass * (2.0 * uniform - 1.0)) * math.sqrt(2.0)
        # If the mass rounds to one, the ends are infinite.
        return torch.addcmul(self.loc, self.scale, quantile.clamp(-self.truncation, self.truncation))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the normalized log-density; minus infinity beyond the truncation."""
        distance = (value - self.loc).abs()
        inside = Normal(self.loc, self.scale, validate_args=False).log_prob(value) - math.log(self.mass)
        # Rounding may take a draw beyond the edge, by an ulp of itself or of the mean.
        rounding = 4.0 * torch.finfo(self.loc.dtype).eps * (distance + self.loc.abs())
        return torch.where(distance <= self.truncation * self.scale + rounding, inside, -math.inf)


@register_kl(TruncatedNormal, torch.distributions.Normal)
def _kl_truncated_to_normal(q: TruncatedNormal, p: Normal) -> Tensor:
    r"""Compute :math:`\log \frac{t}{\sigma} - \log Z - \frac v2 + \frac{v \sigma^2 + (\mu - m)^2}{2 t^2}`."""
    constant = -math.log(q.mass) - 0.5 * q.unit_variance
    return (p.scale / q.scale).log() + constant + 0.5 * (q.variance + (q.loc - p.loc).square()) / p.scale.square()


class TruncatedNormalFamily(LocScale):
    """Put an independent truncated normal on each element of a site.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", appendix F. They draw truncated weights
    for the likelihood and keep the KL of the normal that is not truncated, which bounds no evidence (as they say). Here
    both belong to one posterior, and the loss is a bound.

    :param float truncation: c, how many of the normal's standard deviations an element may be from its mean.
    """

    def __init__(self, truncation: float) -> None:
        super().__init__()
        self.truncation = truncation

    def scale_of(self, site: Any, stddev: Any) -> Any:
        """Return the scale that gives this standard deviation."""
        return stddev / math.sqrt(TruncatedNormal(0.0, 1.0, self.truncation).unit_variance)

    def distribution(self, site: Any, *, loc: Tensor, scale: Tensor) -> Any:  # type: ignore[override]
        """Return the posterior of the site."""
        return TruncatedNormal(loc, scale, self.truncation, validate_args=False).to_event(site.event_dim)
