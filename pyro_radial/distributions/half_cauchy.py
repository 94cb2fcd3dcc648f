# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The half-Cauchy as the root of a product of two gamma variables, and log-normal posteriors on the two."""

import math

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import (
    ExpTransform,
    Gamma,
    InverseGamma,
    LogNormal,
    Normal,
    TransformedDistribution,
)

from pyro_radial.distributions.numerics import check_float


def half_cauchy_factors(scale: Tensor | float) -> tuple[dist.Gamma, dist.InverseGamma]:
    r"""Return two independent distributions; the product of their variables is the square of a half-Cauchy variable.

    .. math:: \mathrm{HalfCauchy}(\gamma)^2 \sim \mathrm{Gamma}(\tfrac12, \mathrm{rate} = 1 / \gamma^2)
        \cdot \mathrm{InverseGamma}(\tfrac12, 1).

    Source: Neville, Ormerod and Wand (2014), as used by Oh, Adamczewski and Park (2019), "Radial and Directional
    Posteriors", section 3.1. They use shape and *scale*, with scale :math:`\gamma^2`; and they set the half-Cauchy
    variable equal to the product instead of its square root.
    """
    check_float("half_cauchy_factors", "scale", scale)
    half_cauchy = dist.HalfCauchy(scale)
    median = half_cauchy.scale
    rate = median.reciprocal().square()
    tiny = torch.finfo(rate.dtype).tiny
    if half_cauchy._validate_args and not bool(((rate >= tiny) & (rate < math.inf)).all()):
        raise ValueError(
            f"half_cauchy_factors: scale must be between about {tiny**0.5:.0e} and {tiny**-0.5:.0e}, so that "
            f"{rate.dtype} holds its square, got {float(median.min()):.4g} to {float(median.max()):.4g}"
        )
    half = torch.full_like(median, 0.5)
    return dist.Gamma(half, rate), dist.InverseGamma(half, torch.ones_like(median))


def half_cauchy_value(gamma: Tensor, inverse_gamma: Tensor) -> Tensor:
    """Return the half-Cauchy value that two factors make; the roots come first because the product may overflow."""
    return gamma.sqrt() * inverse_gamma.sqrt()


def sqrt_product(a: LogNormal, b: LogNormal) -> dist.LogNormal:
    r"""Return the log-normal distribution of the root of the product of two independent log-normal variables.

    .. math:: \sqrt{ab} \sim \mathrm{LogNormal}\left(\tfrac12 (\mu_a + \mu_b),\
        \tfrac12 \sqrt{\sigma_a^2 + \sigma_b^2}\right).

    It turns a posterior on the two factors of a half-Cauchy variable into a posterior on the variable.
    """
    return dist.LogNormal(0.5 * (a.loc + b.loc), 0.5 * torch.hypot(a.scale, b.scale))


def log_mode(distribution: LogNormal) -> Tensor:
    r"""Return the log of the mode of a log-normal distribution, :math:`\mu - \sigma^2`.

    For ``sqrt_product(a, b)`` it is :math:`\tfrac12 (\mu_a + \mu_b) - \tfrac14 (\sigma_a^2 + \sigma_b^2)`, the score
    for pruning. Oh et al. (2019), section 3.3, use the mode of the product, without the root.
    """
    return distribution.loc - distribution.scale.square()


def kl_normal_to_log_gamma(q: Normal, p: TransformedDistribution) -> Tensor:
    r"""Return the KL to the distribution of log w for w ~ Gamma(a, rate=b) or InverseGamma(a, b).

    It equals the KL from the log-normal distribution of ``exp`` of q's variable to the distribution of w.

    .. math:: KL = \log\Gamma(a) - a t + e^{t + s^2 / 2} - \tfrac12 \log(2 \pi e\, s^2), \qquad
        t = \pm\mu + \log b,

    with the plus for a gamma distribution and the minus for an inverse gamma.

    Source: Oh et al. (2019), eq. 51 and 52. They flip the sign of :math:`\mu` in the exponent and have
    :math:`\log 2 s^2` in place of :math:`\log 2 \pi s^2`; their eq. 52 divides by the rate instead of multiplying.
    """
    if p.transforms != [ExpTransform().inv] or not isinstance(p.base_dist, Gamma | InverseGamma):
        raise NotImplementedError
    distribution = p.base_dist
    # The inverse of an inverse-gamma variable is a gamma variable.
    log_gamma_loc = q.loc if isinstance(distribution, Gamma) else -q.loc
    # Added in the exponent, because the product of the rate and e^loc may overflow.
    shifted = log_gamma_loc + distribution.rate.log()
    cross_entropy = (
        distribution.concentration.lgamma()
        - distribution.concentration * shifted
        + (shifted + 0.5 * q.scale.square()).exp()
    )
    return cross_entropy - q.scale.log() - 0.5 * (math.log(2.0 * math.pi) + 1.0)
