# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Densities of counts that stay exact where counts or concentrations are large.

The usual formulas subtract numbers such as ``lgamma(r + y)`` and ``lgamma(r)``, which agree in all digits of float32 if
r is large. Here each term has about the size of the log density.
"""

import math

import pyro.distributions as dist
import torch
from torch import Tensor

# From here on five terms of Stirling's series are exact to 2e-14.
LEAST_BY_SERIES = 10.0


class StablePoisson(dist.Poisson):
    r"""A Poisson distribution with an exact log density at large counts.

    .. math:: \log p(y) = -D(y, m) - \tfrac12 \log(2 \pi y) - s(y), \qquad
        D(a, b) = a \log \tfrac ab - a + b, \qquad \log p(0) = -m

    with the mean m and the error s of Stirling's formula.

    Source: Loader (2000), "Fast and accurate computation of binomial probabilities", section 4.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of counts."""
        if self._validate_args:
            self._validate_sample(value)
        # Zero has its own formula, and the other one must have finite gradients there.
        count = torch.where(value > 0, value, 1).to(self.rate.dtype)
        rate = torch.where(value > 0, self.rate, 1)
        deviance = _deviance(count, rate, count - rate, count.log() - rate.log())
        log_prob = -deviance - 0.5 * (2 * math.pi * count).log() - _stirling_error(count)
        return torch.where(value > 0, log_prob, -self.rate)


class StableNegativeBinomial(dist.NegativeBinomial):
    r"""A negative binomial distribution with an exact log density at large counts and concentrations.

    .. math:: \log p(y) = -D(y, n q) - D(r, n p) - \tfrac12 \log(2 \pi y) - \tfrac12 \log \tfrac nr
        + s(n) - s(r) - s(y), \qquad \log p(0) = r \log p

    with :math:`n = y + r`, the concentration r, the probabilities q and p = 1 - q, and D and s as in
    :class:`StablePoisson`. Both deviances have the same difference, :math:`y - n q = y p - r q`.

    Source: Loader (2000), "Fast and accurate computation of binomial probabilities", section 3; the density is r / n
    times the binomial one at r of n.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of counts."""
        if self._validate_args:
            self._validate_sample(value)
        r = self.total_count
        log_p = torch.nn.functional.logsigmoid(-self.logits)
        log_q = torch.nn.functional.logsigmoid(self.logits)
        p = (-self.logits).sigmoid()
        q = self.logits.sigmoid()
        count = torch.where(value > 0, value, 1).to(r.dtype)
        total = count + r
        difference = count * p - r * q
        log_prob = (
            -_deviance(count, total * q, difference, count.log() - total.log() - log_q)
            - _deviance(r, total * p, -difference, r.log() - total.log() - log_p)
            - 0.5 * ((2 * math.pi * count).log() + (count / r).log1p())
            + (_stirling_error(total) - _stirling_error(r) - _stirling_error(count))
        )
        return torch.where(value > 0, log_prob, r * log_p)


def _deviance(value: Tensor, expected: Tensor, difference: Tensor, log_ratio: Tensor) -> Tensor:
    """Return ``value * log(value / expected) - difference``, exact where both numbers are close, and never negative.

    :param torch.Tensor difference: ``value - expected``.
    :param torch.Tensor log_ratio: ``log(value / expected)``, which counts where it is not close to zero.
    """
    slope = difference / (value + expected)
    square = slope.square()
    # log(value / expected) = 2 atanh(slope)
    series = 1 / 3 + square * (
        1 / 5 + square * (1 / 7 + square * (1 / 9 + square * (1 / 11 + square / 13)))
    )
    near = slope * (difference + 2 * value * square * series)
    return torch.where(slope.abs() < 0.1, near, value * log_ratio - difference)


def _stirling_error(value: Tensor) -> Tensor:
    r"""Return the error of Stirling's formula, :math:`\log\Gamma(z) - (z - \frac12) \log z + z - \frac12 \log 2\pi`."""
    large = value.clamp(min=LEAST_BY_SERIES)
    square = large.square().reciprocal()
    series = (
        1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188)))
    ) / large
    exact = value.lgamma() - (value - 0.5) * value.log() + value - 0.5 * math.log(2 * math.pi)
    return torch.where(value < LEAST_BY_SERIES, exact, series)
